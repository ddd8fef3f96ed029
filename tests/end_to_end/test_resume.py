"""A run that is killed and started again by the same command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.parallel.world import World
from fastdiff.train import train
from tests.support.injected.holding import HOLD, held_at
from tests.support.processes import ON_CPU, deepspeed, deepspeed_command, run_ranks, started
from tests.support.runs import assert_same_checkpoint, flags, hexes, intact, launch, losses, tiny, train_losses
from tests.support.scripts import TRAIN, Launcher, run_job
from tests.support.waiting import wait_for_steps, wait_until

STEPS, EVERY, KILL_AFTER = 40, 5, 11


def config_of(data: Path, folder: Path) -> RunConfig:
    output = {"output__checkpoint_every": EVERY, "output__callbacks": (HOLD,)}
    return tiny(data, folder, steps=STEPS, optim__name="adamw8bit", data__loader="auto", **output)


@pytest.mark.nightly
@pytest.mark.fault(1)
@pytest.mark.parametrize("launcher", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_killed_command_resumes_hex_equal(digits: Path, tmp_path: Path, launcher: bool) -> None:
    """SIGKILL to all processes after step 11, with two ranks under ZeRO-3; then the same flags.

    By night DeepSpeed's launcher and its ranks start Python anew. ``test_random_kills`` has many kills, and both
    optimizers.
    """
    zero3 = "deepspeed_configs/zero3.json"
    whole = config_of(digits, tmp_path / "whole")
    run_ranks(train_losses, whole, Launch(deepspeed=deepspeed_config.read(zero3)), ranks=2)

    command = [*flags(config_of(digits, tmp_path / "killed")), "--deepspeed_config", zero3]
    words = deepspeed_command(*command, ranks=2)
    with held_at(KILL_AFTER, tmp_path / "killed"), started(words) if launcher else Launcher(*words) as process:
        wait_for_steps(tmp_path / "killed", KILL_AFTER, process)
        wait_until(lambda: intact(tmp_path / "killed") == [2 * EVERY, EVERY], "two checkpoints")
    again = deepspeed(*command, ranks=2) if launcher else run_job(TRAIN, *command, *ON_CPU, ranks=2)
    assert again.code == 0, again.output

    resumed = re.search(r"resuming from step (\d+)", again.output)
    assert resumed is not None
    assert int(resumed[1]) == 2 * EVERY
    assert hexes(losses(tmp_path / "killed")) == hexes(losses(tmp_path / "whole"))
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "killed")


def test_a_run_beyond_its_samples_says_so(
    world: World, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command does nothing then, and ends well."""
    train(tiny(digits, tmp_path / "run", steps=4), launch(), world)
    assert "nothing to train" not in capsys.readouterr().err
    train(tiny(digits, tmp_path / "run", steps=2), launch(), world)
    said = capsys.readouterr().err
    assert f"{tmp_path / 'run'} has seen 64 samples, more than --samples 32: there is nothing to train" in said
    assert len(losses(tmp_path / "run")) == 4
