"""Runs that are killed in the middle."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdiff.batch import Batch
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.runs import assert_same_checkpoint, hexes, intact, launch, losses
from tests.support.scripts import TRAIN, Script, run_script
from tests.support.waiting import wait_until


def train_killed(world: World, config: RunConfig) -> None:
    """Train until rank 1 is killed in its third step, after a checkpoint."""
    add_noise, folder = Objective.add_noise, Path(config.output.folder)

    def dying(objective: Objective, batch: Batch, *arguments: Any, **options: Any) -> Any:
        if world.rank == 1 and batch.position.min() >= 2 * config.batch.samples:
            wait_until(lambda: bool(intact(folder)), "a checkpoint")
            os.kill(os.getpid(), signal.SIGKILL)
        return add_noise(objective, batch, *arguments, **options)

    Objective.add_noise = dying  # type: ignore[method-assign]
    train(
        replace(config, output=replace(config.output, sample_every=0), validation=ValidationConfig()), launch(), world
    )


def assert_it_goes_on(digits: Path, folder: Path, optimizer: str, **environment: str) -> None:
    """Kill a run of the digits behind a checkpoint; two steps later it has the bits of one that was left alone."""
    flags: list[str | Path] = [
        "--preset", "digits", "--optim.name", optimizer, "--optim.schedule", "constant", "--optim.warmup-steps", "0",
        "--data.path", digits, "--batch.samples", "16", "--output.log-every", "1", "--output.checkpoint-every", "1",
        "--output.sample-every", "0", "--output.folder",
    ]  # fmt: skip
    killed, whole = folder / "killed", folder / "whole"
    with Script(TRAIN, *flags, killed, "--samples", "16000", **environment):
        wait_until(lambda: bool(intact(killed)), "a checkpoint")
    length = ["--samples", str(16 * (intact(killed)[0] + 2))]
    for own in (killed, whole):
        ended = run_script(TRAIN, *flags, own, *length, **environment)
        assert ended.code == 0, ended.output
    assert hexes(losses(killed)) == hexes(losses(whole))
    assert_same_checkpoint(killed, whole)
