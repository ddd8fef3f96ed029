"""A rank that is killed in the middle of a run."""

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
from tests.support.runs import intact, launch
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
