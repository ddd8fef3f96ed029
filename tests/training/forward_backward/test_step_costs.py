"""Operations, bytes and reads by the host of one optimizer step, in the real loop."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.parallel.consensus import Consensus
from fastdiff.parallel.world import World
from fastdiff.training.ema import Ema
from fastdiff.training.engines.deepspeed import DeepSpeedEngine
from fastdiff.training.guard import StepGuard
from fastdiff.training.loop import train
from tests.support.dispatch_modes import Costs
from tests.support.nights import by_day
from tests.support.runs import launch, newest, tiny

WIDE = DiTConfig(depth=2, hidden=128, heads=2, patch=4, channels=1, size=8, classes=10)
"""Wide enough that parameters outweigh the scalars of a step."""
LIMITS = {1: (28, 58.1), 2: (28, 58.1), 3: (40, 58.1)}
"""By stage: operations, and bytes per parameter."""


def costs_of(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, run: Callable[[], object]) -> list[Costs]:
    """Run, and return the costs of every call of a method."""
    own: Callable[..., Any] = getattr(owner, method)
    found: list[Costs] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        with Costs() as costs:
            value = own(*arguments, **options)
        found.append(costs)
        return value

    with monkeypatch.context() as patched:
        patched.setattr(owner, method, counted)
        run()
    return found


@pytest.mark.parametrize(("stage", "clip"), by_day([(1, 0.5), (3, 0.0)], (1, 0.0), (2, 0.0), (2, 0.5), (3, 0.5)))
def test_a_step_of_zero_takes_few_operations_and_one_read(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, clip: float
) -> None:
    """DeepSpeed's own: 15.9 operations and at least 66 bytes per parameter at stage 1, and two or three reads."""
    config = tiny(digits, tmp_path, steps=3, model=WIDE, optim__clip=clip, performance__precision="bf16")
    last = costs_of(monkeypatch, DeepSpeedEngine, "optimizer_step", lambda: train(config, launch(stage), world))[-1]
    shapes = newest(tmp_path).manifest["parameters"].values()
    operations, per_parameter = LIMITS[stage]
    assert last.reads == 1
    assert last.operations.total() <= operations
    assert last.bytes / sum(map(math.prod, shapes)) <= per_parameter


FLAT_OPERATIONS = {"adamw": 23, "adamw8bit": 30}
FLAT_BYTES = {"adamw": 38.1, "adamw8bit": 26.5}
"""Of norm, exchange of flags, update, one average and copy, per parameter, with bf16 gradients."""
COPY_BYTES = 2
"""Of the copy, an argument that counts as read, too; the kernel only writes it."""
SMALL = DiTConfig(depth=1, hidden=64, heads=2, patch=4, channels=1, size=8, classes=10)
"""For Triton's interpreter."""


@pytest.mark.parametrize("name", by_day(["adamw"], "adamw8bit"))
def test_the_step_of_the_flat_engine_waits_for_the_flags_alone(
    world: World, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With the kernel of a GPU, which here its interpreter runs; the exchange of flags is part of it."""
    config = tiny(
        digits,
        tmp_path,
        steps=3,
        model=SMALL,
        ema__rates=(0.9,),
        optim__name=name,
        performance__precision="bf16",
        performance__engine="flat",
        performance__kernels="auto,adamw=triton,adamw8bit=triton",
    )
    last = costs_of(monkeypatch, StepGuard, "take_step", lambda: train(config, launch(0), world))[-1]
    flags = costs_of(monkeypatch, Consensus, "wait", lambda: train(replace(config, samples=64), launch(0), world))[-1]
    average = costs_of(monkeypatch, Ema, "update", lambda: train(replace(config, samples=80), launch(0), world))[-1]
    shapes = newest(tmp_path).manifest["parameters"].values()
    per = last.bytes / sum(map(math.prod, shapes))
    assert last.reads == flags.reads == 1
    assert last.operations.total() <= FLAT_OPERATIONS[name], last.operations
    assert per - COPY_BYTES <= FLAT_BYTES[name], per
    assert not average.operations, "the update has moved it"
