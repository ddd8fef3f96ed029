"""Train a diffusion model: ``deepspeed fastdiff/train.py --preset digits``. The same command again resumes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from fastdiff import cli, deepspeed_config, dist
from fastdiff.batch import Batch
from fastdiff.callbacks import Callbacks
from fastdiff.config import RunConfig
from fastdiff.dist import World
from fastdiff.errors import FastdiffError, as_storage_error, report
from fastdiff.launch import Launch
from fastdiff.progress import Progress
from fastdiff.quiet import quieten
from fastdiff.start import build_run
from fastdiff.state import TrainState

_GRACE_S = 10.0


def train(config: RunConfig, launch: Launch, world: World) -> Progress:
    """Run, or continue, the run in ``config.output.folder`` to its end.

    Args:
        config: what to train.
        launch: the DeepSpeed JSON and how to treat a run that is there already.
        world: the ranks; all of them call this.

    Raises:
        FastdiffError: with the exit code of what went wrong.
    """
    with ExitStack() as stack:
        state, batches, callbacks = build_run(config, launch, world, stack)
        take_steps(state, batches, callbacks)
        callbacks.on_end(state)
        return state.progress


def take_steps(state: TrainState, batches: Iterator[Batch], callbacks: Callbacks) -> None:
    """Take optimizer steps until the run has seen its samples; ``batches`` are this rank's micro-batches."""
    config, engine, objective, ema, meters = state.config, state.engine, state.objective, state.ema, state.meters
    accumulation = config.batch.accumulation(state.world.size)

    while state.progress.samples < config.samples:
        meters.start_step()
        for _ in range(accumulation):
            with meters.waiting_for_data():
                batch = next(batches)
            corruption = objective.corrupt(batch)
            corruption = objective.dream(corruption, batch, engine)
            prediction = engine(corruption.noisy, corruption.time, **corruption.condition)
            losses = objective.loss(prediction, batch, corruption)
            engine.backward(losses.mean())
            meters.add(losses, batch.position, corruption.levels, corruption.importance)
        objective.timesteps.end_step(state.world)
        state.applied = engine.step()
        state.progress = state.progress.after(config.batch.samples, applied=state.applied)
        if state.applied:
            ema.update(state.progress.applied)
        callbacks.on_step(state)


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code: 0, 2, 65, 70 or 74 (see ``errors.py``)."""
    quieten()
    try:
        launch, config = cli.parse(argv)
        if launch.dry_run:
            cli.print_dry_run(config, deepspeed_config.resolve(launch.deepspeed, config, dist.size()))
            return 0
        train(config, launch, dist.start())
        dist.stop()
    except FastdiffError as error:
        return report(error)
    except OSError as error:
        return report(as_storage_error(error))
    except RuntimeError:
        if dist.size() > 1:
            # Most likely another rank ended and cut the connection. Its message and exit code are the ones to show:
            # the launcher sees them first and ends this rank.
            time.sleep(_GRACE_S)
        raise
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code and dist.size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the ordinary end would wait for the other ranks, or abort in the process group
    sys.exit(code)
