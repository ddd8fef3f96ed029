"""Published files of every form, spelling and rule of alpha are read with the changes that they mean."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.models.adapter_files import forms
from fastdiff.models.adapter_files.low_rank import LowRank
from fastdiff.models.adapter_files.native_names import NamedNetwork
from fastdiff.models.adapter_files.published import changes_of, read_adapter
from tests.support.inputs import tiny_transformers as tiny
from tests.support.nights import by_day

RANK, ALPHA = 4, 2.0
FORMS = {
    "diffusers": forms.DIFFUSERS, "native": forms.NATIVE, "kohya": forms.KOHYA, "kohya of diffusers' names":
    forms.KOHYA_DIFFUSERS, "native with alpha": replace(forms.NATIVE, alpha=True),
    "native of kohya's matrices": replace(forms.KOHYA, prefix="diffusion_model.", flat=False),
    "bare with alpha": replace(forms.DIFFUSERS, alpha=True), "native of peft": replace(forms.NATIVE, prefix="base_model"
    ".model."),
}  # fmt: skip


def file_of(form: forms.Form, names: NamedNetwork, changes: dict[str, LowRank]) -> dict[str, Tensor]:
    return forms.tensors_of(form, forms.in_native_layout(changes, names) if form.native else changes, names.part)


def require_equal(found: dict[str, LowRank], expected: dict[str, LowRank], rank: int = RANK) -> None:
    assert found.keys() == expected.keys()
    for layer, change in expected.items():
        assert found[layer].rank == rank
        theirs, ours = change.change(), found[layer].change()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", tiny.NETWORKS)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_back(kind: str, form: str) -> None:
    names = tiny.network(kind)
    changes = tiny.adapter(names, RANK, ALPHA)
    tensors = file_of(FORMS[form], names, changes)
    if form == "bare with alpha":
        tensors = {name.removeprefix(f"{names.part}."): value for name, value in tensors.items()}
    require_equal(changes_of(tensors, {}, names), changes)


@pytest.mark.parametrize(
    "kind", by_day(["SD3Transformer2DModel"], "Flux2Transformer2DModel", "ZImageTransformer2DModel")
)
@pytest.mark.parametrize("left_out", ["q", "qv"])
def test_queries_keys_and_values_may_be_adapted_alone(kind: str, left_out: str) -> None:
    names = tiny.network(kind)
    without = tuple(
        f"{before}{letter}{after}" for letter in left_out for before, after in (("to_", ""), ("add_", "_proj"))
    )
    changes = tiny.adapter(names, RANK, ALPHA, [layer for layer in names.layers if not layer.endswith(without)])
    require_equal(changes_of(file_of(forms.KOHYA, names, changes), {}, names), changes)


def test_a_fused_layer_of_another_trainer_is_split() -> None:
    """Its three parts share A, as it was trained."""
    names = tiny.network("Flux2Transformer2DModel")
    down, up = torch.randn(RANK, 32), torch.randn(96, RANK)
    key = "lora_unet_double_blocks_1_img_attn_qkv"
    tensors = {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.alpha": torch.tensor(ALPHA)}
    found = changes_of(tensors, {}, names)
    assert list(found) == [f"transformer_blocks.1.attn.to_{letter}" for letter in "qkv"]
    whole = torch.cat([change.change() for change in found.values()])
    torch.testing.assert_close(whole, ALPHA / RANK * up @ down)


SPELLINGS = {
    "peft": (".lora_A.default.weight", ".lora_B.default.weight"),
    "diffusers of old": (".lora.down.weight", ".lora.up.weight"),
    "its processors": ("_lora.down.weight", "_lora.up.weight"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_old_spellings(spelling: str) -> None:
    names = tiny.network("sd15")
    attention = [layer for layer in names.layers if ".attn" in layer]
    changes = tiny.adapter(names, RANK, RANK, attention)
    down, up = SPELLINGS[spelling]
    tensors = {}
    for layer, change in changes.items():
        key = f"unet.{layer}"
        if spelling == "its processors":
            key = key.replace(".to_", ".processor.to_").removesuffix(".0")
        tensors |= {key + down: change.down, key + up: change.up}
    require_equal(changes_of(tensors, {}, names), changes)


def test_rules_of_alpha() -> None:
    """A tensor; 0 is the rank; the metadata of diffusers, with patterns; otherwise the rank."""
    names = tiny.network("QwenImageTransformer2DModel")
    first, second = "transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q"
    changes = tiny.adapter(names, RANK, RANK, [first, second])
    plain = file_of(forms.DIFFUSERS, names, changes)

    def alphas(metadata: object = None, **tensors: float) -> list[float]:
        beside = {f"transformer.{layer}.alpha": torch.tensor(value) for layer, value in tensors.items()}
        text = {} if metadata is None else {"lora_adapter_metadata": json.dumps(metadata)}
        return [change.alpha for change in changes_of(plain | beside, text, names).values()]

    assert alphas() == [4, 4]
    assert alphas(**{first: 1.5, second: 0.0}) == [1.5, 4]
    assert alphas({"transformer.r": 4, "transformer.lora_alpha": 8}) == [8, 8]
    assert alphas({"transformer.lora_alpha": 8, "transformer.alpha_pattern": {"0.attn.to_q": 2}}) == [2, 8]
    assert alphas({"transformer.lora_alpha": 8, "transformer.use_rslora": True}) == [16, 16]
    assert alphas({"text_encoder.lora_alpha": 8}) == [4, 4]
    wrong = [("lora_alpha", "high"), ("alpha_pattern", {"0.attn.(": 2}), ("alpha_pattern", [2])]
    for name, value in wrong:
        with pytest.raises(ConfigError, match=f"gives no alpha of {first} .*; expected a number as lora_alpha"):
            alphas({f"transformer.{name}": value})


def test_peft_has_alpha_in_a_file_beside(tmp_path: Path) -> None:
    names = tiny.network("QwenImageTransformer2DModel")
    layers = [f"transformer_blocks.{block}.attn.to_q" for block in (0, 1)]
    tensors = file_of(replace(forms.DIFFUSERS, prefix="base_model.model."), names, tiny.adapter(names, 4, 4, layers))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    beside = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {"1.attn.to_q": 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(beside))
    found = read_adapter(tmp_path / "adapter_model.safetensors", names)
    assert [found[layer].alpha for layer in layers] == [8, 2]


def _add(key: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({key: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_add("lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight", 4, 4),
         r"1 of its \d+ layers are unknown: lora_te_text_model_encoder_layers_0_mlp_fc1; they are of text encoders, .*"
         "; --lora.skip-text-encoders leaves them out"),
        (_add("lora_unet_double_blocks_7_img_attn_qkv.lora_up.weight", 4, 4),
         "1 of its .* unknown: lora_unet_double_blocks_7_img_attn_qkv; a UNet of Stable Diffusion has none of"),
        (_add("lora_unet_conv_in.dora_scale", 4), "1 of its .* are no matrices of a LoRA, tensors of DoRA: lora_un"),
        (_add("lora_unet_mid_block_attentions_0_proj_in.lokr_w1", 4, 4), ".* tensors of LoKr"),
        (_add("lora_unet_conv_in.lora_up.weight", 8, 4, 1, 1),
         r"lora_unet_conv_in is \[8, 4, 1, 1\] times \[4, 4, 3, 3\], expected \[32, rank\] times \[rank, 4, 3, 3\]"),
        (lambda tensors: tensors.pop("lora_unet_conv_in.lora_down.weight"), "lora_unet_conv_in has no matrix down"),
        (lambda tensors: tensors.clear(), "it has no LoRA"),
    ],
)  # fmt: skip
def test_nothing_is_left_out(change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path) -> None:
    names = tiny.network("sd15")
    tensors = file_of(forms.KOHYA_DIFFUSERS, names, tiny.adapter(names, RANK, ALPHA))
    change(tensors)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=rf"--lora.init .*a.safetensors: {message}"):
        read_adapter(tmp_path / "a.safetensors", names)


def test_a_layer_twice_is_refused() -> None:
    names = tiny.network("sdxl")
    changes = tiny.adapter(names, RANK, ALPHA)
    both = file_of(forms.KOHYA, names, changes) | file_of(forms.KOHYA_DIFFUSERS, names, changes)
    with pytest.raises(ConfigError, match="conv_in is there twice, the second time as lora_unet_conv_in"):
        changes_of(both, {}, names)


@pytest.mark.parametrize("content", [None, b"no safetensors"])
def test_no_file_of_tensors(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"no such file|cannot be read"):
        read_adapter(path, tiny.network("sd15"))
