"""Files of DoRA: what diffusers and ComfyUI make of ours, and what we make of those of other trainers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.errors import ConfigError
from fastdiff.models.adapter_files import forms
from fastdiff.models.adapter_files.low_rank import LowRank
from fastdiff.models.adapter_files.native_names import NamedNetwork
from fastdiff.models.adapter_files.published import changes_of
from fastdiff.models.adapter_files.readers import COMFYUI, DIFFUSERS_READER, KOHYA_READER
from fastdiff.models.adapter_kinds.dora import DORA
from tests.support.inputs import tiny_transformers as tiny
from tests.support.nights import by_day

FORMS = (forms.DIFFUSERS, forms.NATIVE, forms.KOHYA, forms.KOHYA_DIFFUSERS)
CONFIG = LoraConfig(kind="dora", rank=3, alpha=2.0)


def adapter(names: NamedNetwork, layers: list[str] | None = None) -> dict[str, LowRank]:
    generator = torch.Generator().manual_seed(9)
    plain = tiny.adapter(names, 3, 2.0, layers)
    return {n: replace(c, magnitude=0.5 + torch.rand(len(c.up), generator=generator)) for n, c in plain.items()}


def base_of(names: NamedNetwork) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10)
    return {layer: torch.randn(shape, generator=generator) for layer, shape in names.layers.items()}


def file_of(form: forms.Form, names: NamedNetwork, changes: dict[str, LowRank]) -> dict[str, Tensor]:
    return forms.tensors_of(form, forms.in_native_layout(changes, names) if form.native else changes, names.part)


def require_equal(found: Tensor, expected: Tensor, layer: str) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < 1e-6, layer


@pytest.mark.parametrize("kind", by_day(["sd15", "QwenImageTransformer2DModel"], *tiny.NETWORKS))
def test_diffusers_reads_its_own_form(kind: str, tmp_path: Path) -> None:
    """Every layer, convolutions among them, from files of both its names and its metadata."""
    names = tiny.network(kind)
    changes = adapter(names)
    form, model = forms.DIFFUSERS, tiny.transformer(kind)
    metadata = DORA.metadata(form, names.part, CONFIG, list(changes))
    save_file(file_of(form, names, changes), tmp_path / "a.safetensors", metadata)
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert tiny.changes_in_diffusers(model, tmp_path / "a.safetensors").keys() == changes.keys()
    for layer, change in changes.items():
        module: Any = model.get_submodule(layer)
        module.merge()
        torch.testing.assert_close(
            module.base_layer.weight, change.merged(base[f"{layer}.weight"]), rtol=1e-5, atol=1e-5
        )


def in_comfyui(weight: Tensor, tensors: dict[str, Tensor], key: str) -> Tensor:
    """``weight_decompose`` (comfy/weight_adapter/base.py, v0.3.77) for magnitudes of outputs."""
    up, down = tensors[f"{key}.lora_B.weight"], tensors[f"{key}.lora_A.weight"]
    changed = weight + (up.flatten(1) @ down.flatten(1)).view(weight.shape)
    magnitude = tensors[f"{key}.dora_scale"]
    assert magnitude.shape == (len(weight), *[1] * (weight.ndim - 1))
    norm = weight.flatten(1).norm(dim=1).view(magnitude.shape) + torch.finfo(torch.float32).eps
    return changed * (magnitude / norm)


@pytest.mark.parametrize("kind", by_day(["sdxl", "Flux2Transformer2DModel"], *tiny.NETWORKS))
def test_comfyui_reads_native_names(kind: str) -> None:
    """It divides by the norm of the unchanged weight; parts of a fused layer that have no adapter stay."""
    names, form = tiny.network(kind), forms.NATIVE
    base = base_of(names)
    few = [layer for layer in names.layers if not layer.endswith(("to_k", "add_q_proj"))]
    changes = adapter(names, few)
    prepared = DORA.for_form(changes, form, names, lambda name: base[name.removesuffix(".weight")])
    tensors = file_of(form, names, prepared)
    merged = {layer: changes[layer].merged(weight) if layer in changes else weight for layer, weight in base.items()}
    natives, weights = tiny.in_native_layout(names, merged), tiny.in_native_layout(names, base)
    found = {native for native in natives if f"diffusion_model.{native}.dora_scale" in tensors}
    assert found >= {native.name for native in names.natives if set(native.parts) & changes.keys()}
    for native in found:
        torch.testing.assert_close(
            in_comfyui(weights[native], tensors, f"diffusion_model.{native}"), natives[native], rtol=1e-5, atol=1e-5
        )
    with pytest.raises(ConfigError, match=r"for ComfyUI \(--format lora-native\); give the file of --format lora-diff"):
        changes_of(tensors, DORA.metadata(form, names.part, CONFIG, []), names, DORA)


def test_readers_that_drop_the_magnitudes_are_known() -> None:
    applied = [
        (reader.name, form.name)
        for reader in (DIFFUSERS_READER, COMFYUI, KOHYA_READER)
        for form in FORMS
        if DORA.applied_by(reader, form, "UNet2DConditionModel")
    ]
    assert applied == [("diffusers", "diffusers"), ("ComfyUI", "native")]


@pytest.mark.parametrize("kind", ["sdxl", "Flux2Transformer2DModel"])
@pytest.mark.parametrize("form", FORMS[:3], ids=lambda form: form.name)
def test_files_of_every_form_are_read(kind: str, form: forms.Form) -> None:
    """Fused layers, swapped halves and convolutions among them; magnitudes as LyCORIS and as peft spell them."""
    names = tiny.network(kind)
    base, changes = base_of(names), adapter(names)
    tensors = file_of(form, names, changes)
    spellings = ["", ".weight", ".default.weight"] if form == forms.DIFFUSERS else [""]
    for spelling in spellings:
        given = {n + spelling if n.endswith("magnitude_vector") else n: value for n, value in tensors.items()}
        found = changes_of(given, {}, names, DORA)
        assert found.keys() == changes.keys()
        for layer, change in changes.items():
            require_equal(found[layer].merged(base[layer]), change.merged(base[layer]), layer)


def test_other_magnitudes_and_kinds_are_refused() -> None:
    names = tiny.network("sdxl")
    layer = next(name for name in names.layers if name.endswith("ff.net.2"))
    outputs, inputs = names.layers[layer]
    changes = adapter(names, [layer])
    tensors = file_of(forms.KOHYA, names, changes)
    (scale,) = (name for name in tensors if name.endswith("dora_scale"))
    with pytest.raises(ConfigError, match=rf"magnitudes \[1, {inputs}\], expected \[{outputs}, 1\].* for each input"):
        changes_of({**tensors, scale: torch.ones(1, inputs)}, {}, names, DORA)
    with pytest.raises(ConfigError, match=rf"magnitudes \[{outputs + 1}\]"):
        changes_of({**tensors, scale: torch.ones(outputs + 1)}, {}, names, DORA)
    with pytest.raises(ConfigError, match=r"has no magnitudes, it is a LoRA; use --lora.kind lora"):
        changes_of({name: value for name, value in tensors.items() if name != scale}, {}, names, DORA)
    with pytest.raises(ConfigError, match=r"1 of its 4 tensors are no matrices of a LoRA, .*; use --lora.kind dora"):
        changes_of(tensors, {}, names)
