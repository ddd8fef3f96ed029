"""A resume keeps the state of importance sampling."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.diffusion.timesteps import HISTORY
from fastdiff.errors import ConfigError
from fastdiff.parallel.world import World
from fastdiff.train import train
from fastdiff.training.metrics import BY_LEVEL
from tests.support.forked import Ranks
from tests.support.injected.holding import HOLD, held_at
from tests.support.processes import run_ranks
from tests.support.runs import assert_same_checkpoint, hexes, intact, launch, newest, records, tiny, train_losses
from tests.support.waiting import steps_logged, wait_for_steps, wait_until

STEPS, KILL_AFTER = 60, 13


def config_of(data: Path, folder: Path, steps: int = STEPS, density: str = "importance") -> RunConfig:
    """The levels depend on the losses from about step 6 on."""
    config = tiny(data, folder, steps, output__checkpoint_every=5, output__callbacks=(HOLD,))
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
def test_a_killed_run_resumes_with_its_losses(world: World, digits: Path, tmp_path: Path) -> None:
    """SIGKILL after step 13, then the same configuration; and once more without a kill. The latter two in this
    process, which has been started already; ``test_resume`` gives the same command again.
    """
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    same = Launch()
    with held_at(KILL_AFTER, killed), Ranks(train_losses, config_of(digits, killed), same, ranks=1) as process:
        wait_for_steps(killed, KILL_AFTER)
        wait_until(lambda: intact(killed) == [10, 5], "two checkpoints")
        process.kill()
        assert process.wait()[0].code == -signal.SIGKILL
    assert steps_logged(killed) == KILL_AFTER
    assert newest(killed).timesteps()["count"].min() >= HISTORY, "the levels are learned ones"
    resumed = train_losses(world, config_of(digits, killed), same)
    expected = train_losses(world, config_of(digits, whole), same)
    assert hexes(resumed) == hexes(expected)
    assert_same_checkpoint(whole, killed)
    state = newest(killed).timesteps()
    assert (state["history"].dtype, state["history"].shape) == (torch.float32, (5, HISTORY))
    assert state["count"].sum() == STEPS * 16


def test_two_ranks_train_as_one(world: World, digits: Path, tmp_path: Path) -> None:
    """With accumulation: from the beginning, and from a checkpoint of one rank, under ZeRO-3."""

    def config(name: str, steps: int) -> RunConfig:
        """The levels depend on the losses from step 3 on."""
        found = config_of(digits, tmp_path / name, steps)
        return replace(
            found,
            samples=64 * steps,
            batch=replace(found.batch, samples=64, micro=16),
            objective=replace(found.objective, timesteps=4),
            optim=replace(found.optim, lr=1e-3),
        )

    train(config("one", 4), launch(1), world)
    assert newest(tmp_path / "one").timesteps()["count"].min() >= HISTORY, "the levels are learned ones"
    shutil.copytree(tmp_path / "one", tmp_path / "resumed")
    train(config("one", 8), launch(1), world)
    run_ranks(_train_both, config("two", 8), config("resumed", 8), launch(3), ranks=2)
    expected, state = records(tmp_path / "one"), newest(tmp_path / "one").timesteps()
    for name in ("two", "resumed"):
        found = newest(tmp_path / name)
        assert found.manifest["world_size"] == 2
        assert torch.equal(found.timesteps()["count"], state["count"])
        torch.testing.assert_close(found.timesteps()["history"], state["history"], rtol=1e-5, atol=0)
        for a, b in zip(records(tmp_path / name), expected, strict=True):
            assert {key: a[key] for key in ("loss", *BY_LEVEL)} == {
                key: b[key] if b[key] is None else pytest.approx(b[key], rel=1e-6) for key in ("loss", *BY_LEVEL)
            }


def _train_both(world: World, first: RunConfig, second: RunConfig, start: Launch) -> None:
    train(first, start, world)
    train(second, start, world)


def test_another_density_starts_anew(world: World, digits: Path, tmp_path: Path) -> None:
    def to(steps: int, density: str, allowed: tuple[str, ...] = ("timesteps.density",)) -> dict[str, torch.Tensor]:
        train(config_of(digits, tmp_path, steps, density), launch(allow_change=allowed), world)
        return newest(tmp_path).timesteps()

    assert to(2, "uniform") == {}
    with pytest.raises(ConfigError, match=r'--timesteps.density: "uniform" -> "importance"'):
        to(3, "importance", allowed=())
    assert to(3, "importance")["count"].sum() == 16
    assert to(4, "uniform") == {}
