"""A checkpoint keeps what importance sampling has learned."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdiff import deepspeed_config
from fastdiff.config import RunConfig
from fastdiff.dist import World
from fastdiff.errors import ConfigError
from fastdiff.launch import Launch
from fastdiff.noise.importance import HISTORY
from fastdiff.objective_config import TimestepConfig
from fastdiff.train import train
from tests.processes import run, start, stop
from tests.runs import assert_same_checkpoint, flags, hexes, launch, losses, newest, tiny, train_losses
from tests.test_resume import lines, wait_for_step

STEPS, KILL_AFTER = 80, 13


def config_of(data: Path, folder: Path, steps: int = STEPS, density: str = "importance") -> RunConfig:
    """The levels depend on the losses from about step 6 on."""
    config = tiny(data, folder, steps, output__checkpoint_every=5)
    return replace(
        config,
        objective=replace(config.objective, schedule="cosine", timesteps=5),
        timesteps=TimestepConfig(density=density),  # type: ignore[arg-type]
    )


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the processes that tests start: other sums would round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_goes_on_with_its_losses(world: World, digits: Path, tmp_path: Path) -> None:
    """SIGKILL at about step 13, then the same command; and once more without a kill, in this process."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "fastdiff/train.py", *flags(config_of(digits, killed))]
    process = start(command)
    try:
        wait_for_step(killed / "metrics.jsonl", KILL_AFTER)
    finally:
        stop(process)
    assert lines(killed / "metrics.jsonl") < STEPS, "killed too late to prove anything"
    assert newest(killed).timesteps()["count"].min() >= HISTORY, "killed too early to prove anything"
    again = run(command)
    assert again.code == 0, again.output
    resumed = re.search(r"resuming from step (\d+)", again.output)
    assert resumed is not None
    assert int(resumed[1]) >= 10, "not from the beginning"

    expected = train_losses(world, config_of(digits, whole), Launch(deepspeed=deepspeed_config.DEFAULT))
    assert hexes(losses(killed)) == hexes(expected)
    assert_same_checkpoint(whole, killed)
    state = newest(killed).timesteps()
    assert (state["history"].dtype, state["history"].shape) == (torch.float32, (5, HISTORY))
    assert state["count"].sum() == STEPS * 16


def test_another_density_starts_anew(world: World, digits: Path, tmp_path: Path) -> None:
    def to(steps: int, density: str, allowed: tuple[str, ...] = ("timesteps.density",)) -> dict[str, torch.Tensor]:
        train(config_of(digits, tmp_path, steps, density), launch(allow_change=allowed), world)
        return newest(tmp_path).timesteps()

    assert to(2, "uniform") == {}
    with pytest.raises(ConfigError, match=r'--timesteps.density: "uniform" -> "importance"'):
        to(3, "importance", allowed=())
    assert to(3, "importance")["count"].sum() == 16
    assert to(4, "uniform") == {}
