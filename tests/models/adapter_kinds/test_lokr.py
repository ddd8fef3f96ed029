"""LoKr on our networks: initial values, restored weights, 4-bit bases, and starts from published files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError
from fastdiff.export.adapters import changes_of as trained_changes
from fastdiff.models.adapter_files import forms
from fastdiff.models.adapter_files.forms import in_native_layout, tensors_of
from fastdiff.models.adapter_files.kronecker import Kronecker
from fastdiff.models.adapter_files.native_names import NamedNetwork, layers_of, named_network, with_names
from fastdiff.models.adapter_files.published import changes_of, read_adapter
from fastdiff.models.adapter_files.start import start_from_file, with_values_of_file
from fastdiff.models.adapter_kinds.lokr import LOKR, shape_of
from fastdiff.models.build import Model, build_model
from fastdiff.models.lora import add_lora, switch
from fastdiff.models.pretrained.tiny_pipeline import UNETS
from tests.support.inputs import tiny_transformers as tiny
from tests.support.inputs.kronecker import ALPHA, SHAPES, adapter, change
from tests.support.references.transformer_families import FAMILIES

DIT = DiTConfig(depth=2, hidden=32, heads=2, patch=2, channels=4, size=8, classes=10)
MODELS: dict[str, ModelConfig] = {
    "dit": DIT, "sd15": UNETS["sd15"], **{kind: family.config for kind, family in FAMILIES.items()}
}  # fmt: skip
FORMS = {
    "diffusers": forms.DIFFUSERS, "native": forms.NATIVE, "native with alpha": replace(forms.NATIVE, alpha=True),
    "kohya": forms.KOHYA, "kohya of diffusers' names": forms.KOHYA_DIFFUSERS,
    "lycoris": replace(forms.KOHYA_DIFFUSERS, prefix="lycoris_"),
    "diffusion_model of diffusers' names": replace(forms.DIFFUSERS, prefix="diffusion_model.", alpha=True),
    "peft": replace(forms.DIFFUSERS, prefix="base_model.model."),
}  # fmt: skip


def require_equal(found: dict[str, Kronecker], expected: dict[str, Kronecker]) -> None:
    assert found.keys() == expected.keys()
    for layer, own in expected.items():
        theirs = own.change()
        torch.testing.assert_close(found[layer].change(), theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


def unfused(names: NamedNetwork) -> list[str]:
    """The layers that are one layer in the original checkpoint too."""
    return [native.parts[0] for native in names.natives if len(native.parts) == 1]


@pytest.mark.parametrize("kind", tiny.NETWORKS)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_back(kind: str, form: str) -> None:
    """Of every shape of factors; ``norm_out`` has swapped halves in native names."""
    names, file = tiny.network(kind), FORMS[form]
    for shape in SHAPES.values():
        changes = adapter(names, shape, layers=unfused(names) if file.native else None)
        named = in_native_layout(changes, names) if file.native else changes
        require_equal(changes_of(tensors_of(file, named, names.part), {}, names, LOKR), changes)


def test_a_file_means_what_lycoris_and_comfyui_compute() -> None:
    """The definition with the tensors of the file: alpha counts only where a factor is a product."""
    names = tiny.network("sd15")
    for shape in SHAPES.values():
        changes = adapter(names, shape)
        tensors = tensors_of(forms.KOHYA_DIFFUSERS, changes, "unet")
        for layer, size in names.layers.items():
            key = f"lora_unet_{layer.replace('.', '_')}."
            own = {name.removeprefix(key): value for name, value in tensors.items() if name.startswith(key)}
            alpha = float(own.pop("alpha"))
            weight = torch.zeros(size)
            expected = change(own, alpha, size)
            torch.testing.assert_close(changes[layer].merged(weight).double(), expected, rtol=1e-5, atol=1e-4)
            assert alpha == ALPHA


def test_a_tucker_decomposition_is_read_as_a_product() -> None:
    """lokr_t2 of convolutions: ``w2[p, r, k, l] = sum_ij t2[i, j, k, l] w2_a[i, p] w2_b[j, r]``."""
    names = tiny.network("sd15")
    core, left, right, first = (torch.randn(size) for size in ((2, 2, 3, 3), (2, 16), (2, 16), (4, 4)))
    key = "lora_unet_mid_block_resnets_0_conv1"
    tensors = {f"{key}.lokr_t2": core, f"{key}.lokr_w2_a": left, f"{key}.lokr_w2_b": right, f"{key}.lokr_w1": first}
    (found,) = changes_of({**tensors, f"{key}.alpha": torch.tensor(1.0)}, {}, names, LOKR).values()
    second = torch.zeros(16, 16, 3, 3)
    for i in range(2):
        for j in range(2):
            second += left[i, :, None, None, None] * right[j, None, :, None, None] * core[i, j]
    expected = change({"lokr_w1": first, "lokr_w2": second}, 1.0, (64, 64, 3, 3)).float() / 2
    torch.testing.assert_close(found.merged(torch.zeros(64, 64, 3, 3)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 99])
def test_a_file_of_peft_has_its_scale_beside_it(rank: int, tmp_path: Path) -> None:
    """alpha / rank, whole factors or not."""
    from peft import LoKrConfig, get_peft_model

    kind = "QwenImageTransformer2DModel"
    config = LoKrConfig(r=rank, alpha=5, target_modules=["to_q"], decompose_factor=4, init_weights=False)
    model = get_peft_model(tiny.transformer(kind), config)
    model.save_pretrained(tmp_path)
    found = read_adapter(tmp_path / "adapter_model.safetensors", tiny.network(kind), LOKR)
    assert len(found) == 2
    for layer, own in found.items():
        theirs = model.base_model.model.get_submodule(layer).get_delta_weight("default").detach()
        torch.testing.assert_close(own.change(), theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_a_fused_layer_is_split_where_its_blocks_allow(rows: int) -> None:
    """Queries, keys and values are thirds of a product whose w1 has one row, or a multiple of three."""
    names = tiny.network("Flux2Transformer2DModel")
    key = "diffusion_model.double_blocks.1.img_attn.qkv"
    tensors = {f"{key}.lokr_w1": torch.randn(rows, 4), f"{key}.lokr_w2": torch.randn(96 // rows, 8)}
    found = changes_of(tensors, {}, names, LOKR)
    assert list(found) == [f"transformer_blocks.1.attn.to_{letter}" for letter in "qkv"]
    whole = torch.cat([part.change() for part in found.values()])
    torch.testing.assert_close(whole, torch.kron(*tensors.values()))
    if rows > 1:
        file = tensors_of(forms.NATIVE, in_native_layout(found, names), names.part)
        assert all(torch.equal(file[name], value) for name, value in tensors.items()), "the parts share w2"


def test_one_part_of_a_fused_layer_alone() -> None:
    """The others stay: their rows of w1 are 0."""
    names = tiny.network("Flux2Transformer2DModel")
    layer = "transformer_blocks.0.attn.to_k"
    for shape in SHAPES.values():
        changes = adapter(names, shape, layers=[layer])
        found = changes_of(tensors_of(forms.KOHYA, in_native_layout(changes, names), names.part), {}, names, LOKR)
        assert not found["transformer_blocks.0.attn.to_q"].change().any()
        require_equal({layer: found[layer]}, changes)


def _add(key: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({key: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("diffusion_model.img_in.lokr_w1"),
         "diffusion_model.img_in has no lokr_w1, nor lokr_w1_a and lokr_w1_b in its place"),
        (lambda tensors: tensors.pop("diffusion_model.img_in.lokr_w2_a"), ".*no lokr_w2, nor lokr_w2_a in its place"),
        (_add("diffusion_model.img_in.lokr_w1", 8, 2),
         r"diffusion_model.img_in is \[8, 2\] kron \[8, 4\], expected a product of \[32, 16\]; the file is of another"),
        (_add("diffusion_model.img_in.dora_scale", 1, 16), "1 of its .* matrices of a LoKr, tensors of DoRA"),
        (_add("diffusion_model.img_in.hada_w1_a", 1, 16), "1 of its .* matrices of a LoKr, tensors of LoHa"),
        (lambda tensors: tensors.update({
            "diffusion_model.double_blocks.0.img_attn.qkv.lokr_w1": torch.zeros(4, 4),
            "diffusion_model.double_blocks.0.img_attn.qkv.lokr_w2": torch.zeros(24, 8)}),
         "diffusion_model.double_blocks.0.img_attn.qkv: a layer of 96 outputs is 3 layers in diffusers, and a "
         "Kronecker product of one is none of the other: w1 has 4 rows, expected 1 or a multiple of 3"),
    ],
)  # fmt: skip
def test_files_of_other_kinds_and_networks_are_refused(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    names = tiny.network("Flux2Transformer2DModel")
    changes = adapter(names, SHAPES["w2 a product"], layers=["x_embedder"])
    tensors = tensors_of(forms.NATIVE, in_native_layout(changes, names), names.part)
    change(tensors)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=rf"--lora.init .*a.safetensors: {message}"):
        read_adapter(tmp_path / "a.safetensors", names, LOKR)


def test_a_lora_is_not_expected_to_be_a_lokr(tmp_path: Path) -> None:
    names = tiny.network("sd15")
    tensors = tensors_of(forms.KOHYA_DIFFUSERS, adapter(names, SHAPES["whole"]), "unet")
    with pytest.raises(ConfigError, match=r"no matrices of a LoRA, tensors of LoKr: .*; use --lora.kind lokr$"):
        changes_of(tensors, {}, names)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def network() -> Model:
    """Random weights also where a fresh network has zeros."""
    model, generator = build_model(DIT), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def test_a_fresh_adapter_changes_nothing_and_depends_on_the_seed() -> None:
    config = LoraConfig(kind="lokr", rank=2, factor=4)
    torch.manual_seed(3)
    given = {"noisy": torch.randn(2, 4, 8, 8), "time": torch.tensor([7, 800]), "label": torch.tensor([1, 5])}
    plain, first, again, other = (network() for _ in range(4))
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        add_lora(model, config, seed=seed)
    assert torch.equal(first(**given), plain(**given))
    weights = trainable(first)
    assert len(weights) == 2 * 2 * 3, "w1 and both parts of w2, of two layers in two blocks"
    assert all(torch.equal(value, trainable(again)[name]) for name, value in weights.items())
    drawn = [name for name, value in weights.items() if value.any()]
    assert len(drawn) == 2 * 2 * 2
    assert not any(torch.equal(weights[name], trainable(other)[name]) for name in drawn)
    trained = {name: torch.randn_like(value) for name, value in weights.items()}
    restored = network()
    add_lora(restored, replace(config, quantize="4bit"), seed=8, weights=trained)
    assert all(torch.equal(value, trainable(restored)[name]) for name, value in trained.items())
    changed = restored(**given)
    switch(restored, on=False)
    assert not torch.allclose(changed, restored(**given))


def written(path: Path, kind: str, form: str, options: LoraConfig) -> tuple[Path, dict[str, Kronecker]]:
    """A file of random changes of the layers that a run adapts; in native names of all that are no part of another."""
    model = MODELS[kind]
    names = named_network(model)
    ends = tuple(f".{end}" for end in model.lora_targets)
    layers = [layer for layer in names.layers if f".{layer}".endswith(ends)]
    changes = adapter(names, shape_of(options), 2.0, unfused(names) if FORMS[form].native else layers)
    named = in_native_layout(changes, names) if FORMS[form].native else changes
    save_file(tensors_of(FORMS[form], named, names.part), path / "a.safetensors")
    return path / "a.safetensors", changes


def started(kind: str, config: LoraConfig) -> dict[str, Kronecker]:
    """The changes of a network before its first step."""
    network = build_model(MODELS[kind])
    names = with_names(MODELS[kind], layers_of(network))
    add_lora(network, replace(config, init=""), seed=3)
    start_from_file(network, config, names)
    return trained_changes(trainable(network), config)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "form", "options"),
    [
        ("sd15", "kohya", LoraConfig(kind="lokr", rank=2, factor=4)),
        ("sd15", "kohya", LoraConfig(kind="lokr", rank=1, decompose_both=True)),
        ("flux2", "native", LoraConfig(kind="lokr", rank=2, factor=2)),
        ("z-image", "diffusers", LoraConfig(kind="lokr", rank=1, factor=4, full_matrix=True)),
        ("qwen-image", "lycoris", LoraConfig(kind="lokr", rank=3)),
    ],
)
def test_a_run_starts_from_the_file_with_its_options(kind: str, form: str, options: LoraConfig, tmp_path: Path) -> None:
    file, changes = written(tmp_path, kind, form, options)
    found = with_values_of_file(LoraConfig(kind="lokr", init=str(file)), MODELS[kind])
    assert shape_of(replace(found, factor=options.factor)) == shape_of(options)
    if FORMS[form].alpha:
        assert found.numerator == 2.0
    first = started(kind, found)
    require_equal(first, changes)
    assert {layer: (own.rows, own.columns, own.rank) for layer, own in first.items()} == {
        layer: (own.rows, own.columns, own.rank) for layer, own in changes.items()
    }


def test_a_run_may_have_another_scale_and_rank_and_whole_factors(tmp_path: Path) -> None:
    file, changes = written(tmp_path, "sd15", "kohya", LoraConfig(kind="lokr", rank=2, factor=4))
    for options in ({"rank": 3, "alpha": 9.0}, {"full_matrix": True}, {"rank": 99}):
        asked = replace(LoraConfig(kind="lokr", init=str(file)), **options)  # type: ignore[arg-type]
        require_equal(started("sd15", with_values_of_file(asked, MODELS["sd15"])), changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"factor": 8}, r"--lora.factor 8 with --lora.rank 2 makes other factors than 48 of its 83 .*: conv_in is"),
        ({"rank": 1}, r"every --lora.factor with --lora.rank 1 makes other factors than 83 of its 83 layers have"),
        ({"targets": ("to_q",)}, "75 of its 83 layers are not among --lora.targets to_q"),
    ],
)
def test_what_the_run_could_not_hold_is_refused(given: dict[str, object], message: str, tmp_path: Path) -> None:
    file, _ = written(tmp_path, "sd15", "kohya", LoraConfig(kind="lokr", rank=2, factor=4))
    with pytest.raises(ConfigError, match=f"--lora.init .*: {message}"):
        with_values_of_file(replace(LoraConfig(kind="lokr", init=str(file)), **given), MODELS["sd15"])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["lokr", "dora"])
@pytest.mark.parametrize(
    ("option", "value", "without"), [("groups", 2, "groups"), ("padding_mode", "circular", "padded by zeros")]
)
def test_a_convolution_of_another_kind_is_refused(kind: str, option: str, value: object, without: str) -> None:
    model = build_model(UNETS["sd15"])
    setattr(model.get_submodule("conv_in"), option, value)
    with pytest.raises(ConfigError, match=rf"--lora.targets conv_in: a \w+ is for convolutions .*{without}"):
        add_lora(model, LoraConfig(kind=kind, rank=2, targets=("conv_in",)), seed=0)  # type: ignore[arg-type]


def test_alpha_is_told_where_it_has_an_effect() -> None:
    lora = LoraConfig(kind="lokr", rank=2, alpha=3.0, factor=4)
    assert LOKR.size(lora) == "rank 2, factor 4, alpha 3"
    assert LOKR.size(replace(lora, full_matrix=True)) == "full factors, factor 4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 4}, "--lora.factor 4 is for --lora.kind lokr"),
        ({"kind": "lokr", "factor": 0}, "--lora.factor 0: above 0, or -1"),
        ({"kind": "lokr", "full_matrix": True, "decompose_both": True}, "--lora.full_matrix with --lora.decompose"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(rank=2, **options)  # type: ignore[arg-type]
