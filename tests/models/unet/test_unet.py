"""The UNet against diffusers' network with the same weights."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastdiff.config.networks.unet import UNetConfig
from fastdiff.errors import ConfigError
from fastdiff.models.unet.blocks import ResBlock, TransformerBlock
from fastdiff.models.unet.network import UNet
from fastdiff_kernels import dispatch
from fastdiff_kernels.dispatch import Choice
from tests.support.references.unet_reference import (
    SMALL,
    built,
    difference,
    diffusers_forward,
    diffusers_unet,
    gradients,
    inputs,
)

PUBLISHED = {
    "sd15": UNetConfig(),
    "sd2": UNetConfig(attention_heads=(5, 10, 20, 20), cross_attention_dim=1024, use_linear_projection=True),
    "sdxl": UNetConfig(
        size=128, block_out_channels=(320, 640, 1280), attention_heads=(5, 10, 20), transformer_layers=(0, 2, 10),
        mid_transformer_layers=10, cross_attention_dim=2048, use_linear_projection=True, pooled_dim=1280,
    ),
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", SMALL)


@kinds
def test_output_and_every_gradient_equal_those_of_diffusers(kind: str) -> None:
    config = SMALL[kind]
    ours, theirs = built(config), diffusers_unet(config)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    arguments = inputs(config)
    got, expected = ours(**arguments), diffusers_forward(theirs, arguments)
    assert got.shape == arguments["noisy"].shape
    assert difference(got, expected) < 1e-5
    first, second = gradients(ours, got), gradients(theirs, expected)
    assert first.keys() == second.keys() == dict(ours.named_parameters()).keys()
    worst = max((difference(first[name], second[name]), name) for name in first)
    assert worst[0] < 1e-5, worst


@kinds
def test_weights_go_both_ways_and_begin_alike(kind: str) -> None:
    config = SMALL[kind]
    torch.manual_seed(4)
    theirs = diffusers_unet(config)
    torch.manual_seed(4)
    ours = UNet(config)
    weights = theirs.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in ours.state_dict().items())
    other = built(config, seed=9)
    other.load_state_dict(weights, strict=True)
    assert all(torch.equal(value, weights[name]) for name, value in other.state_dict().items())
    theirs.load_state_dict(built(config).state_dict(), strict=True)


@pytest.mark.parametrize(("kind", "count"), [("sd15", 859_520_964), ("sd2", 865_910_724), ("sdxl", 2_567_463_684)])
def test_parameter_counts_of_published_sizes(kind: str, count: int) -> None:
    config = PUBLISHED[kind]
    with torch.device("meta"):
        ours, theirs = UNet(config), diffusers_unet(config)
    assert sum(p.numel() for p in ours.parameters()) == count
    shapes = [{name: p.shape for name, p in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert UNetConfig.from_diffusers(theirs.config) == config


def changed(**entries: Any) -> dict[str, Any]:
    return {**PUBLISHED["sd15"].to_diffusers(), **entries}


@pytest.mark.parametrize(
    "entries",
    [
        {"act_fn": "gelu"},
        {"dropout": 0.1},
        {"attention_head_dim": None},
        {"resnet_time_scale_shift": "scale_shift"},
        {"class_embed_type": "timestep"},
        {"out_channels": 8},
        {"time_cond_proj_dim": 256},
        {"down_block_types": ["AttnDownBlock2D"] * 4},
        {"up_block_types": ["UpBlock2D"] * 4},
        {"cross_attention_dim": [768, 768, 768, 1280]},
        {"layers_per_block": [2, 2, 2, 1]},
        {"transformer_layers_per_block": [[1, 2], 1, 1, 1]},
        {"norm_num_groups": None},
        {"sample_size": [64, 96]},
        {"mid_block_type": None},
    ],
)
def test_other_networks_are_refused_by_the_entry(entries: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json has {next(iter(entries))} .*Stable Diffusion"):
        UNetConfig.from_diffusers(changed(**entries))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"in_channels": 9}, "in_channels 9 and out_channels 4: the network of an inpainting pipeline"),
        ({"addition_embed_type_num_heads": 8}, "heads with which addition_embed_type 'text' .* remove it"),
        (
            {
                "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "cross_attention_dim": 1280,
                "projection_class_embeddings_input_dim": 2560,
            },
            "refiner of Stable Diffusion XL .* five numbers",
        ),
    ],
)  # fmt: skip
def test_related_networks_are_refused_by_name(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UNetConfig.from_diffusers(changed(**entries))


def test_entries_may_be_left_out_or_be_one_number() -> None:
    short = {"in_channels": 4, "out_channels": 4, "block_out_channels": [320, 640, 1280, 1280], "_class_name": "x"}
    assert UNetConfig.from_diffusers({**short, "attention_head_dim": 8, "cross_attention_dim": 768}) == UNetConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_heads": (8, 8)}, "one entry of 1 or more for each of the 4"),
        ({"block_out_channels": (320, 640, 1280, 1270)}, "1270 must be divisible"),
        ({"transformer_layers": (1, 1, 1, 2)}, "mid_transformer_layers"),
        ({"mid_transformer_layers": 0}, "mid_transformer_layers 0"),
        ({"size": 60}, "size 60"),
        ({"attention_heads": (0, 8, 8, 8)}, "attention_heads"),
        ({"block_out_channels": (321, 640, 1280, 1280), "norm_num_groups": 1, "attention_heads": (1,) * 4}, "even"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UNetConfig(**fields)


def test_inputs_that_do_not_fit_are_refused() -> None:
    model, arguments = built(SMALL["sd15"]), inputs(SMALL["sd15"])
    with pytest.raises(ConfigError, match=r"10 x 8.*must be divisible by 4"):
        model(**inputs(SMALL["sd15"], height=10))
    with pytest.raises(ConfigError, match=r"neither pooled nor time_ids.*given pooled"):
        model(**arguments, pooled=torch.zeros(2, 20))
    given = inputs(SMALL["sdxl"])
    with pytest.raises(ConfigError, match=r"takes pooled and time_ids.*given pooled;"):
        built(SMALL["sdxl"])(given["noisy"], given["time"], given["context"], given["pooled"])


def test_layers_say_what_they_use() -> None:
    config = replace(SMALL["sd15"], layers_per_block=1)
    model, example = built(config, attention="reference"), torch.zeros(1)
    names = dict(dispatch.explain(model, example))
    plain = Choice("group_norm", "reference", "reference", "the tensor is on cpu")
    attention = "down_blocks.1.attentions.0.transformer_blocks.0.attn2"
    assert names[""] == names["down_blocks.2.resnets.0"] == names["mid_block.attentions.0"] == plain
    assert names[attention] == Choice("attention", "reference", "reference", "asked for")
    layers = Counter(type(module) for module in model.modules())
    assert len(names) == 1 + layers[ResBlock] + 3 * layers[TransformerBlock], "one transformer, two attentions each"
    model.compile_blocks()
    names = dict(dispatch.explain(model, example))
    inductor = "compile (Inductor)"
    assert names["mid_block.resnets.1"] == Choice("group_norm", inductor, inductor, f"{plain.why}; in a compiled block")
    assert names["mid_block.attentions.0"] == plain
    with dispatch.forced(group_norm="triton"):
        names = dict(dispatch.explain(model, example))
    assert names["mid_block.resnets.1"] == names[""] == Choice("group_norm", "triton", "triton", "forced")
