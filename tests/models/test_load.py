"""Networks that start from the weights of a file."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_model
from fastdiff.models.load import build_network, build_on_meta, resolve
from fastdiff.models.pretrained.tiny_pipeline import build as build_pipeline

SMALL = DiTConfig(channels=1, size=8, patch=2, hidden=16, depth=1, heads=2, classes=10)


def started(path: Path, state: dict[str, Tensor], model: DiTConfig = SMALL) -> dict[str, Tensor]:
    """State of a network of this shape that starts from these weights, by way of a file."""
    if path.suffix == ".pt":
        torch.save({"ema": state}, path)
    else:
        save_file(state, path)
    start = PretrainedConfig(path=str(path), weights=True)
    return build_network(RunConfig(model=model, pretrained=start, output=OutputConfig(sample_every=0))).state_dict()


@pytest.mark.parametrize("name", ["dit.pt", "model.safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_dit_with_its_table_of_positions(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Rounded, and with the error of an average of 0.9999 x + 0.0001 x."""
    state = build_model(SMALL, seed=3).state_dict()
    table, average = state["pos_embed"], state["pos_embed"].clone()
    for _ in range(3000):
        average.mul_(0.9999).add_(table, alpha=1 - 0.9999)
    assert not torch.equal(average, table)
    given = {name: value.to(dtype) for name, value in {**state, "pos_embed": average}.items()}
    found = started(tmp_path / name, given)
    assert torch.equal(found.pop("pos_embed"), table)
    assert all(torch.equal(value, given[name].float()) for name, value in found.items())


def test_a_dit_of_another_grid_has_its_own_table(tmp_path: Path) -> None:
    state, larger = build_model(SMALL, seed=3).state_dict(), replace(SMALL, size=12)
    found = started(tmp_path / "dit.pt", state, larger)
    assert torch.equal(found["pos_embed"], build_model(larger).state_dict()["pos_embed"])


@pytest.mark.parametrize("name", ["dit.pt", "model.safetensors"])
def test_other_positions_are_refused(tmp_path: Path, name: str) -> None:
    """Learned ones, rows and columns exchanged, too few, in another shape, not a number."""
    state = build_model(SMALL, seed=3).state_dict()
    table = state["pos_embed"]
    for other in (
        table + 0.02 * torch.randn(table.shape, generator=torch.Generator().manual_seed(0)),
        table.roll(8, dims=2),
        table[:, :15].clone(),
        table[:, :0].clone(),
        table[..., :14].clone(),
        table[0].clone(),
        torch.full_like(table, torch.nan),
    ):
        with pytest.raises(ConfigError, match=r"pos_embed, of shape \([\d, ]+\), is not the fixed sine-cosine table"):
            started(tmp_path / name, {**state, "pos_embed": other})


def _starts(folder: Path) -> Iterator[RunConfig]:
    """Runs from a seed, from published files, and from a pipeline whose UNet is in two files."""
    plain = RunConfig(model=SMALL, seed=3, output=OutputConfig(sample_every=0))
    yield plain
    state = build_model(SMALL, seed=4).state_dict()
    torch.save({"ema": state}, folder / "dit.pt")
    save_file({name: value.half() for name, value in state.items()}, folder / "dit.safetensors")
    for name in ("dit.pt", "dit.safetensors"):
        yield replace(plain, pretrained=PretrainedConfig(path=str(folder / name), weights=True))
    pipeline = build_pipeline(folder / "sdxl", kind="sdxl")
    yield resolve(replace(preset("sd15-finetune"), pretrained=PretrainedConfig(path=str(pipeline), weights=True)))


def test_weights_one_after_another_are_those_of_the_whole_network(tmp_path: Path) -> None:
    for config in _starts(tmp_path):
        whole = build_network(config)
        network, weights = build_on_meta(config)
        assert all(p.is_meta for p in network.parameters())
        found, expected = dict(weights), whole.state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], value), name


def test_weights_in_safetensors_are_read_one_at_a_time(tmp_path: Path) -> None:
    for config in _starts(tmp_path):
        if config.pretrained.path.endswith(".pt") or not config.pretrained.path:
            continue
        alive: list[weakref.ref[Tensor]] = []
        for _, value in build_on_meta(config)[1]:
            alive = [other for other in alive if other() is not None]
            assert len(alive) <= 2
            alive.append(weakref.ref(value))
        assert alive


def test_other_positions_of_a_file_are_refused_before_there_is_memory_for_it(tmp_path: Path) -> None:
    path = tmp_path / "dit.safetensors"
    state = build_model(SMALL, seed=4).state_dict()
    config = RunConfig(
        model=SMALL, pretrained=PretrainedConfig(path=str(path), weights=True), output=OutputConfig(sample_every=0)
    )
    with pytest.raises(ConfigError, match="no such file"):
        build_on_meta(config)
    save_file({**state, "pos_embed": state["pos_embed"] + 1}, path)
    with pytest.raises(ConfigError, match="is not the fixed sine-cosine table"):
        build_on_meta(config)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot be read"):
        build_on_meta(config)


def test_shapes_of_another_network_are_refused_before_there_is_memory_for_it() -> None:
    config = RunConfig(model=SMALL, output=OutputConfig(sample_every=0))
    shapes = {name: tuple(p.shape) for name, p in build_model(SMALL).named_parameters()}
    network, weights = build_on_meta(config, shapes)
    assert [name for name, _ in weights] == ["pos_embed"]
    assert {name for name, _ in network.named_parameters()} == shapes.keys()
    for wrong in ({**shapes, "more": (1,)}, {**shapes, min(shapes): (7, 7)}):
        with pytest.raises(ConfigError, match="the weights belong to another network: "):
            build_on_meta(config, wrong)
