"""Flat engine: its losses, skips, resumes and checkpoints beside those of DeepSpeed's ZeRO-0 to 3."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdiff.config.deepspeed import resolve
from fastdiff.config.engine import choose
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.models import kernel_choice, load
from fastdiff.models.build import Model
from fastdiff.parallel.world import World
from fastdiff.training import network
from fastdiff.training.loop import train
from tests.support.forked import forked_ranks, values
from tests.support.nights import by_day
from tests.support.runs import (
    assert_same_checkpoint,
    hexes,
    launch,
    losses,
    newest,
    records,
    tiny,
    train_losses,
)
from tests.training.callbacks.test_divergence import in_step, marred

APART = {"fp32": 2e-7, "bf16": 1e-3, "8bit": 1e-5}
"""Bounds of the relative difference of losses over 8 steps; measured on 1, 2 and 4 ranks: 2.4e-8, 2.7e-4 and 0."""
Found = dict[tuple[str, str, int], list[float]]


def run_of(digits: Path, folder: Path, engine: str, steps: int = 8, **options: Any) -> RunConfig:
    """A run that clips some steps and decays weights."""
    options = {"optim__clip": 0.5, "optim__weight_decay": 0.01, "performance__engine": engine, **options}
    return tiny(digits, folder, steps=steps, **options)


WHOLE, HALF = 1, 2
"""Micro-batches of a rank in a step."""
BY_DAY = {
    1: [("fp32", WHOLE), ("fp32", HALF), ("bf16", WHOLE), ("bf16", HALF)],
    2: [("fp32", WHOLE), ("bf16", HALF)],
    4: [("fp32", HALF), ("bf16", WHOLE)],
}
"""Precisions and micro-batches by the number of ranks; by night every number has those of one rank."""


def losses_of_engines(world: World, digits: Path, folder: Path, *, long: bool = False) -> Found:
    """Losses by engine, precision and micro-batch."""
    found: Found = {}
    if world.size < 4:  # the 8-bit AdamW, whose reference is slow
        for engine in ("deepspeed", "flat"):
            config = run_of(digits, folder / f"{world.size}-8bit-{engine}", engine, 4, optim__name="adamw8bit")
            found[engine, "8bit", 0] = train_losses(world, config, launch(0))
    for precision, parts in BY_DAY[1 if long else world.size]:
        micro = 16 // world.size // parts
        for engine in ("deepspeed", "flat"):
            own = folder / f"{world.size}-{precision}-{micro}-{engine}"
            options = {"performance__precision": precision, "batch__micro": micro}
            config = run_of(digits, own, engine, **options)
            found[engine, precision, micro] = train_losses(world, config, launch(0))
    return found


def apart(first: Sequence[float], second: Sequence[float]) -> float:
    """Largest relative difference of two losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("ranks", by_day([1, 2], 4))
def test_its_losses_are_those_of_deepspeed(
    world: World, digits: Path, tmp_path: Path, ranks: int, nightly: bool
) -> None:
    """On one rank in fp32 equal to the bit; a last digit of the norm, or of a sum of ranks, moves other weights."""
    if ranks == 1:
        found = losses_of_engines(world, digits, tmp_path)
    else:
        found = values(forked_ranks(partial(losses_of_engines, long=nightly), digits, tmp_path, ranks=ranks))[0]
    for (engine, precision, micro), own in found.items():
        theirs = found["deepspeed", precision, micro]
        if engine == "flat" and ranks == 1 and precision == "fp32":
            assert hexes(own) == hexes(theirs)
        elif engine == "flat":
            assert apart(own, theirs) < APART[precision]


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Norm of the difference of all parameters, relative to that of ``expected``.

    A single element may be far off: AdamW makes whole steps of gradients that are zero but for rounding.
    """
    first, second = (torch.cat([values[name].flatten() for name in expected]) for values in (found, expected))
    return float((first - second).norm() / second.norm())


def trained(world: World, configs: Sequence[RunConfig], stages: Sequence[int]) -> None:
    """Train one after the other; those with the same folder resume."""
    for config, stage in zip(configs, stages, strict=True):
        train(config, launch(stage), world)


@pytest.mark.parametrize(
    ("precision", "micro", "samples"),
    by_day([("bf16", 8, (11, 2))], ("fp32", 8, (11, 2)), ("fp32", 4, (0, 2))),
)
def test_steps_that_are_not_finite_are_skipped_as_by_deepspeed(
    tmp_path: Path, precision: str, micro: int, samples: tuple[int, int]
) -> None:
    """NaN at one rank and infinity at the other, or both in the first of two micro-batches of the first rank.

    A step that is skipped moves neither averages nor learning rate.
    """
    data = marred(tmp_path / "data", {in_step(3, samples[0]): np.nan, in_step(5, samples[1]): -np.inf})
    options = {"performance__precision": precision, "optim__schedule": "linear", "batch__micro": micro}
    runs = {engine: run_of(data, tmp_path / engine, engine, **options) for engine in ("deepspeed", "flat")}
    values(forked_ranks(trained, list(runs.values()), [0, 0]))
    skipped = {engine: (tmp_path / engine / "skipped.jsonl").read_text() for engine in runs}
    assert skipped["flat"] == skipped["deepspeed"]
    assert [record["skipped"] for record in records(tmp_path / "flat")] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [r["lr"] for r in records(tmp_path / "flat")] == [r["lr"] for r in records(tmp_path / "deepspeed")]
    assert apart(losses(tmp_path / "flat"), losses(tmp_path / "deepspeed")) < APART[precision]
    both = [newest(tmp_path / engine) for engine in runs]
    for kind in ("master", "ema/0.9", "exp_avg", "exp_avg_sq"):
        theirs, ours = (found.full(kind) for found in both)
        assert all(torch.isfinite(value).all() for value in ours.values())
        assert distance(ours, theirs) < 30 * APART[precision], kind


@pytest.mark.parametrize(
    ("ranks", "optimizer", "kernels"),
    by_day([(2, "adamw8bit", "auto")], (1, "adamw", "auto"), (1, "adamw", "auto,adamw=triton"), (2, "adamw", "auto")),
)
def test_a_resumed_run_is_equal_to_the_bit(
    world: World, digits: Path, tmp_path: Path, ranks: int, optimizer: str, kernels: str
) -> None:
    """Losses, weights, moments and averages."""
    steps = (2, 4)
    # In bf16 Triton's interpreter would round the copy in another way than torch.
    options = {"performance__precision": "fp32" if "triton" in kernels else "bf16"}
    options |= {"performance__kernels": kernels, "optim__name": optimizer}
    whole = run_of(digits, tmp_path / "whole", "flat", steps[1], **options)
    parts = [run_of(digits, tmp_path / "parts", "auto", count, **options) for count in steps]
    if ranks == 1:
        trained(world, [whole, *parts], [0, 0, 0])
    else:
        values(forked_ranks(trained, [whole, *parts], [0, 0, 0], ranks=ranks))
    assert newest(tmp_path / "parts").manifest["engine"] == "flat"
    assert hexes(losses(tmp_path / "parts")) == hexes(losses(tmp_path / "whole"))
    assert_same_checkpoint(tmp_path / "parts", tmp_path / "whole")


def test_its_checkpoints_and_those_of_every_stage_fit_each_other(world: World, digits: Path, tmp_path: Path) -> None:
    """One run that changes the engine every two steps, on two ranks and then on one, beside one that does not.

    Measured: losses 2.7e-7 apart, weights 1.6e-5, averages 6.4e-6, moments 6.6e-7 and 3.4e-7.
    """
    order = [("flat", 0), ("deepspeed", 3), ("flat", 0), ("deepspeed", 1), ("flat", 0), ("deepspeed", 0), ("flat", 0)]
    chain = [run_of(digits, tmp_path / "chain", engine, 2 * n) for n, (engine, _) in enumerate(order, start=1)]
    values(forked_ranks(trained, chain, [stage for _, stage in order]))
    train(run_of(digits, tmp_path / "chain", "flat", 16), launch(0), world)
    train(run_of(digits, tmp_path / "alone", "flat", 16), launch(0), world)
    assert apart(losses(tmp_path / "chain"), losses(tmp_path / "alone")) < 1e-6
    chained, alone = newest(tmp_path / "chain"), newest(tmp_path / "alone")
    for kind in ("master", "ema/0.9", "exp_avg", "exp_avg_sq"):
        assert distance(chained.full(kind), alone.full(kind)) < 1e-4, kind


def built_apart(world: World, digits: Path, folder: Path, stage: int, options: dict[str, Any]) -> list[str]:
    """Build an engine of a network with other weights and buffers on rank 1; return what is not that of rank 0."""
    build = load.build_network

    def apart(*given: Any, **options: Any) -> Model:
        model = build(*given, **options)
        for value in (*model.parameters(), *model.buffers()):
            value.data += world.rank
        return model

    config = run_of(digits, folder, "auto", **options)
    expected = build(config, None)
    with mock.patch.object(load, "build_network", apart):
        model, engine = network.build_engine(config, resolve(launch(stage).deepspeed, config, 2), world, None)
    values = {name: value.detach() for name, value in (*expected.named_parameters(), *expected.named_buffers())}
    held = [*model.named_parameters(), *model.named_buffers()]
    wrong = [name for name, value in held if not torch.equal(value, values[name].to(value.dtype))]
    for flat in engine.flats:
        for part in flat.fragments:
            master = part.of(flat.master)
            if not torch.equal(master, part.within(values[part.name]).view_as(master)):
                wrong.append(f"master of {part.name}")
    return wrong


@pytest.mark.parametrize(
    ("stage", "captured", "precision"), [(0, True, "bf16"), (0, True, "fp32"), (0, False, "bf16"), (1, False, "bf16")]
)
def test_all_ranks_begin_with_the_weights_of_rank_0(
    digits: Path, tmp_path: Path, stage: int, captured: bool, precision: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also the fp32 ones before rounding, and where neither DistributedDataParallel nor DeepSpeed sends them."""
    options = {"performance__precision": precision, "performance__cuda_graph": captured}
    assert values(forked_ranks(built_apart, digits, tmp_path, stage, options)) == [[], []]
    assert "rank 1 had other values than rank 0 in " in capfd.readouterr().err


def built_larger(world: World, digits: Path, folder: Path) -> str:
    """Build an engine whose network is wider on rank 1; return the error."""
    config = run_of(digits, folder, "flat")
    config = replace(config, model=replace(config.model, hidden=32 + 32 * world.rank))
    with pytest.raises(ConfigError) as raised:
        network.build_engine(config, resolve(launch(0).deepspeed, config, 2), world, None)
    return str(raised.value)


def test_ranks_with_other_networks_are_refused(digits: Path, tmp_path: Path) -> None:
    first, second = values(forked_ranks(built_larger, digits, tmp_path))
    assert first == second
    assert re.match(
        r"the network of rank 1 has .*: \[384\] .*, that of rank 0 \[192\] .*; start all ranks with the same", first
    )


def test_a_run_keeps_its_engine(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that is older than the flat engine; a new one takes the flat engine at stage 0."""
    described: list[bool] = []
    choices = kernel_choice.choices

    def spied(*given: Any, flat: bool, **named: Any) -> Any:
        described.append(flat)
        return choices(*given, flat=flat, **named)

    monkeypatch.setattr(kernel_choice, "choices", spied)
    config = run_of(digits, tmp_path, "deepspeed", 2)
    train(config, launch(0), world)
    train(run_of(digits, tmp_path, "auto", 4), launch(0), world)
    assert newest(tmp_path).manifest["engine"] == "deepspeed"
    assert described == [False, False], "the ops are those of the engine that it keeps"
    train(run_of(digits, tmp_path, "flat", 6), launch(0), world)
    assert "DeepSpeed goes on" not in capsys.readouterr().err
    train(run_of(digits, tmp_path, "auto", 8), launch(1), world)
    assert "the flat engine trained this run, DeepSpeed goes on; " in capsys.readouterr().err
    automatic = run_of(digits, tmp_path, "auto")
    resolved = resolve(launch(0).deepspeed, automatic, 1)
    sections = automatic.optim, automatic.performance
    assert choose(*sections, resolved, {"zero_stage": 0}) == "deepspeed"
    assert choose(*sections, resolved, {"zero_stage": 0, "engine": "flat"}) == "flat"
    assert choose(*sections, resolved, {"zero_stage": 3}) == choose(*sections, resolved) == "flat"


@pytest.mark.parametrize(
    ("options", "deepspeed", "message"),
    [
        ({}, {"zero_optimization": {"stage": 1}}, "--performance.engine flat with ZeRO stage 1: .*_config ddp"),
        ({"performance__precision": "fp16"}, {}, "--performance.engine flat with --performance.precision fp16"),
        ({"optim__name": "adamw8bit-bnb"}, {}, "--performance.engine flat with --optim.name adamw8bit-bnb"),
        ({}, {"wall_clock_breakdown": True}, "has wall_clock_breakdown: remove it"),
    ],
)
def test_what_it_cannot_train_is_refused(
    digits: Path, tmp_path: Path, options: dict[str, Any], deepspeed: dict[str, Any], message: str
) -> None:
    """``auto`` leaves it to DeepSpeed."""
    config = run_of(digits, tmp_path, "flat", **options)
    resolved = resolve(deepspeed, config, 1)
    with pytest.raises(ConfigError, match=message):
        choose(config.optim, config.performance, resolved)
    automatic = replace(config, performance=replace(config.performance, engine="auto"))
    assert choose(automatic.optim, automatic.performance, resolved) == "deepspeed"
