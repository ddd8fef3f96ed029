"""The start under ZeRO-3, where no rank holds the whole network."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from fastdiff.config.deepspeed import resolve
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.models.load import build_network, build_on_meta
from fastdiff.parallel.fragments import assemble
from fastdiff.parallel.world import World
from fastdiff.training import build as building
from fastdiff.training import network
from fastdiff.training.build import build
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from fastdiff.training.loop import train
from fastdiff.training.metrics import peak_resident_bytes
from fastdiff.training.zero.stage3 import partition
from tests.support.forked import forked_ranks, values
from tests.support.nights import by_day
from tests.support.runs import launch, newest, tiny, train_losses


def _weights(world: World, config: RunConfig, start: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters and working copies of a run before its first step."""
    with ExitStack() as stack:
        engine = build(config, start, world, stack).state.engine
        masters = assemble(world, engine.flats, [flat.master for flat in engine.flats], engine.shapes)
        module = engine.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            copies = {name: p.detach().clone() for name, p in module.named_parameters()}
        assert not any(buffer.is_meta for buffer in module.buffers())
        return masters, copies


def _differences(world: World, digits: Path, folder: Path, *, long: bool) -> list[str]:
    """Weights that differ from those of the whole network of the run: initial and saved ones."""
    wrong = []
    for precision, dtype, briefly in (("fp32", torch.float32, 0), ("bf16", torch.bfloat16, 2000)):
        for always_gathered in (0, 2000) if long else (briefly,):  # parameters of up to so many elements
            start = launch(3)
            assert start.deepspeed is not None
            start.deepspeed["zero_optimization"]["stage3_param_persistence_threshold"] = always_gathered
            run = folder / f"{precision}-{always_gathered}"
            config = tiny(digits, run, steps=2, performance__precision=precision)
            for kind in ("initial", "saved"):
                whole = build_network(config, None if kind == "initial" else newest(run).weights())
                masters, copies = _weights(world, config, start)
                for name, value in whole.named_parameters():
                    if not torch.equal(masters[name], value.detach()):
                        wrong.append(f"{kind} master of {name}")
                    if not torch.equal(copies[name], value.detach().to(dtype)):
                        wrong.append(f"{kind} copy of {name}")
                if kind == "initial":
                    train(config, start, world)
    return wrong


def test_two_ranks_have_the_weights_of_the_whole_network(digits: Path, tmp_path: Path, nightly: bool) -> None:
    assert values(forked_ranks(partial(_differences, long=nightly), digits, tmp_path)) == [[], []]


def _both(world: World, config: RunConfig, whole: RunConfig) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one whose engine gets a whole network."""
    found = train_losses(world, config, launch(3))

    def build_whole(config: RunConfig, ds_config: Any, world: World, saved: Any) -> Any:
        model, _ = network._build_model(config, world, saved, apart=False)
        return model, DeepSpeedEngine(model, config, ds_config, world, blocks=model.block_classes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "build_engine", build_whole)
        return found, train_losses(world, whole, launch(3))


@pytest.mark.parametrize("precision", by_day(["bf16"], "fp32"))
def test_losses_are_those_of_an_engine_that_gets_a_whole_network(digits: Path, tmp_path: Path, precision: str) -> None:
    configs = [tiny(digits, tmp_path / name, performance__precision=precision) for name in ("new", "whole")]
    for found, whole in values(forked_ranks(_both, *configs)):
        assert found == whole


def _rise(world: World, config: RunConfig) -> float:
    """Rise of the memory of this rank while its part of the network is made, in bytes per parameter."""
    model, weights = build_on_meta(config)
    parameters = sum(p.numel() for p in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_resident_bytes()
    partition(model, resolve(launch(3).deepspeed, config, world.size), torch.bfloat16, world.device)
    for _ in weights:
        pass
    return (peak_resident_bytes() - before) / parameters


def test_a_rank_needs_memory_for_its_part_alone(digits: Path, tmp_path: Path) -> None:
    """Two ranks in bf16 have one byte per parameter each; the whole network has four in fp32 and then two in bf16."""
    config = tiny(digits, tmp_path, performance__precision="bf16")
    config = replace(config, model=replace(config.model, hidden=512, depth=12, heads=8))
    for rise in values(forked_ranks(_rise, config)):
        assert rise < 3


def test_weights_that_a_node_keeps_are_those_of_the_run(digits: Path, tmp_path: Path) -> None:
    """DeepSpeed makes these copies of the zeros from which a start fills the network."""
    found = {}
    for kept in (1, 2):
        config = tiny(digits, tmp_path / str(kept), steps=3, output__checkpoint_every=2)
        start = launch(3)
        assert start.deepspeed is not None
        changes = {"stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": kept}
        start.deepspeed["zero_optimization"] |= changes
        first = values(forked_ranks(train_losses, config, start))[0]
        longer = replace(config, samples=config.samples * 2)
        found[kept] = first, values(forked_ranks(train_losses, longer, start))[0]
    assert found[2] == found[1]


@pytest.mark.parametrize(
    ("stage", "section", "message"),
    [
        (2, {"reduce_bucket": 3}, "reduce_bucket: Extra inputs are not permitted; correct or remove"),
        (2, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "Partial offloading only supported for ZeRO"),
    ],
)
def test_what_deepspeed_refuses_is_one_error(
    world: World, digits: Path, tmp_path: Path, stage: int, section: dict[str, Any], message: str
) -> None:
    start = launch(stage)
    assert start.deepspeed is not None
    start.deepspeed["zero_optimization"] |= section
    with pytest.raises(ConfigError, match=f"DeepSpeed refuses the DeepSpeed JSON: .*{message}"):
        train(tiny(digits, tmp_path), start, world)
