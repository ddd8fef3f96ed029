"""Every weight of every network is declared: which are matrices of hidden layers, and where a fused one is cut."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.registry import ModelConfig, networks
from fastdiff.config.networks.user_defined import add_network
from fastdiff.errors import ConfigError
from fastdiff.models.family import family_of
from fastdiff.models.fused import Fused, Matrices
from fastdiff.models.matrices import declared_matrices
from fastdiff.parallel.fragments import Shapes
from tests.support.references import adm_networks, pixart_reference, unet_reference
from tests.support.references.transformer_families import FAMILIES

_SMALL = {"depth": 2, "hidden": 48, "heads": 2, "channels": 1, "size": 8, "classes": 10}
NETWORKS: Mapping[str, ModelConfig] = {
    "dit": DiTConfig(**_SMALL),  # type: ignore[arg-type]
    "dit-recipes": DiTConfig(
        **_SMALL, mlp="swiglu", teacher_width=24, teacher_norm=True, in_context=4, in_context_from=1, qk_norm=True,
        patch_bottleneck=16, rotary=True,
    ),  # type: ignore[arg-type]
    "dit-single": DiTConfig(**_SMALL, modulation="adaln-single", value_residual=True),  # type: ignore[arg-type]
    "dit-training": DiTConfig(
        **_SMALL, routing="sprint", routing_from=1, routing_to=1, aligned_width=8, aligned_block=1, aligned_hidden=32,
    ),  # type: ignore[arg-type]
    **{f"pixart-{name}": config for name, config in pixart_reference.SMALL.items()},
    **{f"unet-{name}": config for name, config in unet_reference.SMALL.items()},
    **{f"adm-{name}": config for name, config in adm_networks.SMALL.items()},
    **{name: family.config for name, family in FAMILIES.items()},
}  # fmt: skip
EXPECTED: Mapping[str, Mapping[str, str]] = {
    "dit": {
        "1": "attn.proj mlp.fc1 mlp.fc2 t_embedder.mlp.2",
        "3": "attn.qkv",
        "6": "adaLN_modulation.1",
        "adamw": (
            "final_layer.adaLN_modulation.1 final_layer.linear t_embedder.mlp.0 x_embedder.proj "
            "y_embedder.embedding_table"
        ),
    },
    "dit-recipes": {
        "1": "attn.proj mlp.w3 t_embedder.mlp.2",
        "2": "mlp.w12",
        "3": "attn.qkv",
        "6": "adaLN_modulation.1",
        "adamw": (
            "cls_projectors final_layer.adaLN_modulation.1 final_layer.linear final_layer.linear_cls "
            "in_context_posemb t_embedder.mlp.0 x_embedder.proj1 x_embedder.proj2 y_embedder.embedding_table"
        ),
    },
    "dit-single": {
        "1": "attn.proj mlp.fc1 mlp.fc2 t_embedder.mlp.2",
        "3": "attn.qkv",
        "6": "t_block.1",
        "adamw": (
            "adaLN_modulation.scale_shift_table final_layer.adaLN_modulation.scale_shift_table final_layer.linear "
            "t_embedder.mlp.0 x_embedder.proj y_embedder.embedding_table"
        ),
    },
    "dit-training": {
        "1": "attn.proj fusion_proj mlp.fc1 mlp.fc2 projectors.0.0 projectors.0.2 t_embedder.mlp.2",
        "3": "attn.qkv",
        "6": "adaLN_modulation.1",
        "adamw": (
            "final_layer.adaLN_modulation.1 final_layer.linear mask_token projectors.0.4 t_embedder.mlp.0 "
            "x_embedder.proj y_embedder.embedding_table"
        ),
    },
    "pixart-alpha": {
        "1": (
            "adaln_single.emb.aspect_ratio_embedder.linear_2 adaln_single.emb.resolution_embedder.linear_2 "
            "adaln_single.emb.timestep_embedder.linear_2 attn1.to_k attn1.to_out.0 attn1.to_q attn1.to_v "
            "attn2.to_k attn2.to_out.0 attn2.to_q attn2.to_v caption_projection.linear_2 ff.net.2 proj"
        ),
        "6": "adaln_single.linear",
        "adamw": (
            "adaln_single.emb.aspect_ratio_embedder.linear_1 adaln_single.emb.resolution_embedder.linear_1 "
            "adaln_single.emb.timestep_embedder.linear_1 caption_projection.linear_1 pos_embed.proj proj_out "
            "scale_shift_table"
        ),
    },
    "pixart-sigma": {
        "1": (
            "adaln_single.emb.timestep_embedder.linear_2 attn1.to_k attn1.to_out.0 attn1.to_q attn1.to_v "
            "attn2.to_k attn2.to_out.0 attn2.to_q attn2.to_v caption_projection.linear_2 ff.net.2 proj"
        ),
        "6": "adaln_single.linear",
        "adamw": (
            "adaln_single.emb.timestep_embedder.linear_1 caption_projection.linear_1 pos_embed.proj proj_out "
            "scale_shift_table"
        ),
    },
    "unet-sd15": {
        "1": (
            "attn1.to_k attn1.to_out.0 attn1.to_q attn1.to_v attn2.to_k attn2.to_out.0 attn2.to_q attn2.to_v conv "
            "conv1 conv2 conv_shortcut ff.net.2 proj_in proj_out time_emb_proj time_embedding.linear_2"
        ),
        "2": "proj",
        "adamw": "conv_in conv_out time_embedding.linear_1",
    },
    "unet-sd2": {
        "1": (
            "attn1.to_k attn1.to_out.0 attn1.to_q attn1.to_v attn2.to_k attn2.to_out.0 attn2.to_q attn2.to_v conv "
            "conv1 conv2 conv_shortcut ff.net.2 proj_in proj_out time_emb_proj time_embedding.linear_2"
        ),
        "2": "proj",
        "adamw": "conv_in conv_out time_embedding.linear_1",
    },
    "unet-sdxl": {
        "1": (
            "add_embedding.linear_2 attn1.to_k attn1.to_out.0 attn1.to_q attn1.to_v attn2.to_k attn2.to_out.0 "
            "attn2.to_q attn2.to_v conv conv1 conv2 conv_shortcut ff.net.2 proj_in proj_out time_emb_proj "
            "time_embedding.linear_2"
        ),
        "2": "proj",
        "adamw": "add_embedding.linear_1 conv_in conv_out time_embedding.linear_1",
    },
    "adm-iddpm": {
        "1": "conv in_layers.2 op out_layers.3 proj_out skip_connection time_embed.2",
        "2": "emb_layers.1",
        "3 x 2": "qkv",
        "adamw": "input_blocks.0.0 label_emb out.2 time_embed.0",
    },
    "adm-lsun": {
        "1": "conv emb_layers.1 in_layers.2 op out_layers.3 proj_out skip_connection time_embed.2",
        "3": "qkv",
        "adamw": "input_blocks.0.0 out.2 time_embed.0",
    },
    "adm-adm": {
        "1": "in_layers.2 out_layers.3 proj_out skip_connection time_embed.2",
        "2": "emb_layers.1",
        "3": "qkv",
        "adamw": "input_blocks.0.0 label_emb out.2 time_embed.0",
    },
    "adm-adm added": {
        "1": "emb_layers.1 in_layers.2 out_layers.3 proj_out skip_connection time_embed.2",
        "3 x 4": "qkv",
        "adamw": "input_blocks.0.0 out.2 time_embed.0",
    },
    "adm-upsampler": {
        "1": "conv in_layers.2 op out_layers.3 proj_out skip_connection time_embed.2",
        "3 x 4": "qkv",
        "2": "emb_layers.1",
        "adamw": "input_blocks.0.0 label_emb out.2 time_embed.0",
    },
    "flux2": {
        "1": (
            "attn.add_k_proj attn.add_q_proj attn.add_v_proj attn.to_add_out attn.to_k attn.to_out attn.to_out.0 "
            "attn.to_q attn.to_v ff.linear_out ff_context.linear_out "
            "time_guidance_embed.timestep_embedder.linear_2"
        ),
        "2": "ff.linear_in ff_context.linear_in",
        "3": "single_stream_modulation.linear",
        "5": "attn.to_qkv_mlp_proj",
        "6": "double_stream_modulation_img.linear double_stream_modulation_txt.linear",
        "adamw": "context_embedder norm_out.linear proj_out time_guidance_embed.timestep_embedder.linear_1 x_embedder",
    },
    "z-image": {
        "1": (
            "attention.to_k attention.to_out.0 attention.to_q attention.to_v feed_forward.w1 feed_forward.w2 "
            "feed_forward.w3 t_embedder.mlp.2"
        ),
        "4": "adaLN_modulation.0",
        "adamw": (
            "all_final_layer.2-1.adaLN_modulation.1 all_final_layer.2-1.linear all_x_embedder.2-1 cap_embedder.1 "
            "cap_pad_token t_embedder.mlp.0 x_pad_token"
        ),
    },
    "qwen-image": {
        "1": (
            "attn.add_k_proj attn.add_q_proj attn.add_v_proj attn.to_add_out attn.to_k attn.to_out.0 attn.to_q "
            "attn.to_v img_mlp.net.2 proj time_text_embed.timestep_embedder.linear_2 txt_mlp.net.2"
        ),
        "6": "img_mod.1 txt_mod.1",
        "adamw": "img_in norm_out.linear proj_out time_text_embed.timestep_embedder.linear_1 txt_in",
    },
    "sd3": {
        "1": (
            "attn.add_k_proj attn.add_q_proj attn.add_v_proj attn.to_add_out attn.to_k attn.to_out.0 attn.to_q "
            "attn.to_v attn2.to_k attn2.to_out.0 attn2.to_q attn2.to_v ff.net.2 ff_context.net.2 proj "
            "time_text_embed.text_embedder.linear_2 time_text_embed.timestep_embedder.linear_2"
        ),
        "2": "norm1_context.linear",
        "6": "norm1.linear norm1_context.linear",
        "9": "norm1.linear",
        "adamw": (
            "context_embedder norm_out.linear pos_embed.proj proj_out time_text_embed.text_embedder.linear_1 "
            "time_text_embed.timestep_embedder.linear_1"
        ),
    },
}
"""By network: the matrices in a weight, and the names of those weights behind the number of their block."""


def shapes_of(config: ModelConfig) -> Shapes:
    with torch.device("meta"):
        model = family_of(config).build(config, recompute=False, attention="sdpa", seed=0)
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def by_count(shapes: Shapes, matrices: Matrices) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        one = matrices.get(name)
        groups = f" x {one.groups}" if one is not None and one.groups > 1 else ""
        count = "adamw" if one is None else f"{len(one.heights)}{groups}"
        if len(shape) > 1:
            found.setdefault(count, set()).add(re.sub(r".*\.\d+\.(?=[a-z])", "", name.removesuffix(".weight")))
    return {count: " ".join(sorted(names)) for count, names in found.items()}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_weight_of_a_network_is_declared(name: str) -> None:
    config, shapes = NETWORKS[name], shapes_of(NETWORKS[name])
    matrices = declared_matrices(config, shapes, "this test")
    assert by_count(shapes, matrices) == EXPECTED[name]
    assert all(len(shapes[one]) > 1 for one in matrices), "a vector is no matrix"
    for one, matrix in matrices.items():
        assert matrix.groups * sum(matrix.heights) * matrix.columns == torch.Size(shapes[one]).numel()


def test_every_network_of_this_package_has_a_row() -> None:
    assert EXPECTED.keys() == NETWORKS.keys()
    assert {config.kind for config in NETWORKS.values()} == {
        kind for kind, config in networks().items() if config.__module__.startswith("fastdiff.")
    }


def test_parts_of_other_heights_are_cut_where_they_meet() -> None:
    config = FAMILIES["flux2"].config
    matrices = declared_matrices(config, shapes_of(config), "this test")
    assert matrices["single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"].heights == (32, 32, 32, 96, 96)


PLAIN = """
import torch
from torch import nn
from fastdiff.models.fused import ONE

class Tiny(nn.Module):
    matrices = {MATRICES}

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(64, width)
        self.out = nn.Linear(width, 64)

    def forward(self, noisy, time):
        return self.out(self.inner(noisy.flatten(1))).view_as(noisy)
"""


@pytest.mark.parametrize(
    ("matrices", "undeclared"),
    [('{"inner.weight": ONE, "out.*": None}', ""), ('{"inner.weight": ONE}', "out.weight"), ("{}", "inner.weight")],
)
def test_a_module_of_a_user_declares_its_matrices(matrices: str, undeclared: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.py"
    file.write_text(PLAIN.replace("{MATRICES}", matrices))
    kind = add_network(f"{file}:Tiny", "--model.kind")
    config = networks()[kind]()
    shapes = shapes_of(config)
    if undeclared:
        with pytest.raises(
            ConfigError, match=f"network tiny does not declare whether {undeclared}, .*is a matrix; name"
        ):
            declared_matrices(config, shapes, "--optim.name muon")
    else:
        assert declared_matrices(config, shapes, "--optim.name muon").keys() == {"inner.weight"}


def test_a_weight_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(ConfigError, match=r"shape \[7, 4\] cannot be cut along its rows into 1 x \(1, 1\)"):
        Fused((1, 1)).cut((7, 4))
