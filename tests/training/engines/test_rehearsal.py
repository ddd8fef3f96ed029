"""The step that is rehearsed: it meets the memory of a real one, and nothing of it remains."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.parallel.world import World
from fastdiff.training.build import build
from fastdiff.training.loop import take_steps
from fastdiff.training.rehearsal import rehearse
from fastdiff.training.state import TrainState
from tests.support.forked import forked_ranks, values
from tests.support.nights import by_day
from tests.support.runs import launch, tiny

STEPS, AFTER = 4, 2
"""Steps of a run, and those before it is rehearsed once more."""
Held = dict[str, Tensor]


def held_by(state: TrainState) -> Held:
    """Copies of everything that a step changes."""
    found = {"random numbers": torch.get_rng_state(), "sums of losses": state.meters.sums.clone()}
    for number, flat in enumerate(state.engine.flats):
        found[f"weights {number}"] = flat.master.clone()
        found |= {f"{name} {number}": value.clone() for name, value in flat.state.items() if torch.is_tensor(value)}
    for name, averages in state.ema.averages.items():
        found |= {f"average {name} {n}": value.clone() for n, value in enumerate(averages) if value is not None}
    for name, parameter in state.engine.module.named_parameters():
        found[f"copy of {name}"] = parameter.detach().clone()
    found["loss scale"] = torch.tensor(list(state.engine.loss_scale.values()))
    found["learning rate"] = torch.tensor([group["lr"] for group in state.engine.optimizer.param_groups])
    return found


def trained(world: World, config: RunConfig, start: Launch, *, rehearsed: bool) -> Held:
    """Train; in between rehearse, if so, and compare the state before and after."""
    with ExitStack() as stack:
        run = build(config, start, world, stack)
        state = run.state
        state.config = replace(config, samples=AFTER * config.batch.samples)
        take_steps(state, run.batches, run.callbacks)
        state.config = config
        if rehearsed:
            before = held_by(state)
            rehearse(state, run.callbacks)
            require_equal(held_by(state), before)
        take_steps(state, run.batches, run.callbacks)
        return held_by(state)


def require_equal(found: Held, expected: Held) -> None:
    assert found.keys() == expected.keys()
    assert {name for name, value in expected.items() if not torch.equal(found[name], value)} == set()


def both(world: World, digits: Path, folder: Path, start: Launch, options: dict[str, Any]) -> None:
    """Compare the ends of a run that was rehearsed in its midst and of one that was not."""
    configs = [tiny(digits, folder / str(n), STEPS, optim__schedule="linear", **options) for n in (0, 1)]
    # torch computes in fp16 on every CPU, only slowly
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True):
        require_equal(*(trained(world, config, start, rehearsed=bool(n)) for n, config in enumerate(configs)))


@pytest.mark.parametrize("ranks", by_day([1], 2))
@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize(
    ("engine", "stage", "precision"),
    [
        ("flat", 0, "fp32"),
        ("flat", 0, "bf16"),
        ("deepspeed", 0, "fp32"),
        ("deepspeed", 0, "bf16"),
        ("deepspeed", 1, "bf16"),
        ("deepspeed", 2, "fp16"),
        ("deepspeed", 3, "fp16"),
    ],
)
def test_nothing_of_a_rehearsal_remains(
    world: World, digits: Path, tmp_path: Path, engine: str, stage: int, precision: str, micro: int | None, ranks: int
) -> None:
    """Neither at once nor in the steps that follow: no gradient, no counter."""
    options = {"performance__engine": engine, "performance__precision": precision, "batch__micro": micro}
    if ranks == 1:
        both(world, digits, tmp_path, launch(stage), options)
    else:
        values(forked_ranks(both, digits, tmp_path, launch(stage), options, ranks=ranks))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_of_a_rehearsal_remains_in_sums_on_the_host(
    world: World, digits: Path, tmp_path: Path, stage: int
) -> None:
    """DeepSpeed keeps those of an offloaded optimizer from one step to the next."""
    start = launch(stage)
    start.deepspeed["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    options = {"performance__engine": "deepspeed", "performance__precision": "bf16", "batch__micro": 4}
    both(world, digits, tmp_path, start, options)
