"""A LoRA that starts from a published file changes every layer as the file says, whatever the form."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastdiff.config.networks.adapter_rank import rank_of
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError
from fastdiff.export.adapters import changes_of
from fastdiff.models.adapter_files import forms
from fastdiff.models.adapter_files.low_rank import LowRank
from fastdiff.models.adapter_files.native_names import layers_of, named_network, with_names
from fastdiff.models.adapter_files.start import start_from_file, with_values_of_file
from fastdiff.models.build import build_model
from fastdiff.models.lora import add_lora
from fastdiff.models.pretrained.tiny_pipeline import UNETS
from tests.support.inputs.tiny_transformers import adapter
from tests.support.nights import by_day
from tests.support.references.transformer_families import FAMILIES

MODELS: dict[str, ModelConfig] = {**UNETS, **{kind: family.config for kind, family in FAMILIES.items()}}
FORMS = {"diffusers": forms.DIFFUSERS, "native": forms.NATIVE, "kohya": forms.KOHYA}
RANK, ALPHA = 4, 2.0


def written(
    path: Path, kind: str, form: str = "diffusers", targets: tuple[str, ...] = ()
) -> tuple[LoraConfig, dict[str, LowRank]]:
    """A file of random changes, and the run's configuration of it."""
    model = MODELS[kind]
    names, ends = named_network(model), tuple(f".{end}" for end in targets or model.lora_targets)
    changes = adapter(names, RANK, ALPHA, [layer for layer in names.layers if f".{layer}".endswith(ends)])
    named = forms.in_native_layout(changes, names) if FORMS[form].native else changes
    metadata = forms.metadata_of(FORMS[form], names.part, RANK, ALPHA, [])
    file = path / f"{kind}-{form}.safetensors"
    save_file(forms.tensors_of(FORMS[form], named, names.part), file, metadata)
    return LoraConfig(init=str(file)), changes


def started(kind: str, config: LoraConfig) -> dict[str, LowRank]:
    """The changes of a network before its first step."""
    network = build_model(MODELS[kind])
    names = with_names(MODELS[kind], layers_of(network))
    add_lora(network, replace(config, init=""), seed=3)
    start_from_file(network, config, names)
    trainable = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
    return changes_of(trainable, config)


def require_equal(found: dict[str, LowRank], expected: dict[str, LowRank]) -> None:
    for layer, change in expected.items():
        theirs = change.change()
        torch.testing.assert_close(found[layer].change(), theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("kind", "form"),
    by_day(
        [("sd15", "kohya"), ("sdxl", "native"), ("flux2", "kohya"), ("z-image", "diffusers")],
        *((kind, form) for kind in MODELS for form in FORMS),
    ),
)
def test_rank_alpha_and_layers_are_those_of_the_file(kind: str, form: str, tmp_path: Path) -> None:
    config, changes = written(tmp_path, kind, form)
    assert config.rank == RANK
    found = with_values_of_file(config, MODELS[kind])
    assert found.numerator == pytest.approx(RANK if form in ("diffusers", "native") else ALPHA)
    first = started(kind, found)
    assert first.keys() == changes.keys()
    require_equal(first, changes)


def test_the_layers_are_named_by_their_ends_or_in_full(tmp_path: Path) -> None:
    config, _ = written(tmp_path, "sd15", targets=("to_q", "ff.net.2"))
    assert with_values_of_file(config, MODELS["sd15"]).targets == ("net.2", "to_q")
    config, changes = written(tmp_path, "sd15", targets=("mid_block.attentions.0.proj_in",))
    found = with_values_of_file(config, MODELS["sd15"])
    assert found.targets == ("mid_block.attentions.0.proj_in",)
    assert started("sd15", found).keys() == changes.keys()


def test_a_run_may_have_another_scale_and_rank_and_more_layers(tmp_path: Path) -> None:
    """The change is that of the file. What is new has A as drawn, and B is 0."""
    config, changes = written(tmp_path, "sd15", "kohya", targets=("to_q",))
    asked = replace(config, rank=6, alpha=9.0, targets=("to_q", "to_v"))
    assert with_values_of_file(asked, MODELS["sd15"]) == asked
    found = started("sd15", asked)
    require_equal(found, changes)
    for layer, change in found.items():
        assert (change.rank, change.alpha) == (6, 9.0)
        assert bool(change.down.all()), "no row of A is 0, which could not be trained"
        fresh = change.up[:, RANK:] if layer in changes else change.up
        assert not fresh.any()


def test_layers_of_different_scales(tmp_path: Path) -> None:
    _, changes = written(tmp_path, "sd15", "kohya")
    first = next(iter(changes))
    changes[first] = replace(changes[first], alpha=7.0)
    file = tmp_path / "b.safetensors"
    save_file(forms.tensors_of(forms.KOHYA_DIFFUSERS, changes, "unet"), file)
    config = with_values_of_file(LoraConfig(init=str(file)), MODELS["sd15"])
    assert config.alpha is None
    require_equal(started("sd15", config), changes)


def test_the_rank_is_read_from_fused_layers_alone(tmp_path: Path) -> None:
    """They have three times the rows; the metadata has the rank."""
    config, changes = written(tmp_path, "flux2", "kohya", targets=("to_q", "to_k", "to_v"))
    assert config.rank == RANK
    require_equal(started("flux2", with_values_of_file(config, MODELS["flux2"])), changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 2}, r"32 of its 32 layers have a rank above --lora.rank 2: .* and 29 more; use --lora.rank 4"),
        ({"targets": ("to_q",)}, "24 of its 32 layers are not among --lora.targets to_q: .*leave --lora.targets out"),
    ],
)
def test_what_the_run_leaves_out_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, _ = written(tmp_path, "sd15")
    with pytest.raises(ConfigError, match=f"--lora.init .*: {message}"):
        with_values_of_file(replace(config, **given), MODELS["sd15"])


def test_a_file_of_another_network_is_refused(tmp_path: Path) -> None:
    config, _ = written(tmp_path, "sdxl", "kohya")
    with pytest.raises(ConfigError, match=r"of its \d+ layers are unknown: lora_unet_.* a UNet of Stable"):
        with_values_of_file(config, MODELS["sd15"])


def test_files_without_a_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--lora.init .*no.safetensors: no such file"):
        LoraConfig(init=str(tmp_path / "no.safetensors"))
    with pytest.raises(ConfigError, match=r"--lora.init .*a.pt: expected a .safetensors file"):
        LoraConfig(init=str(tmp_path / "a.pt"))
    save_file({"w": torch.zeros(2)}, tmp_path / "whole.safetensors")
    with pytest.raises(ConfigError, match=r"--lora.init .*whole.safetensors: it has no matrices of a LoRA"):
        rank_of(tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:20])
    with pytest.raises(ConfigError, match=r"--lora.init .*cut.safetensors: no safetensors file"):
        rank_of(tmp_path / "cut.safetensors")
