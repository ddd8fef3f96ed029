"""fastdiff's own loop with checkpoints: steps without a save, steps during one, and a step that waits for one."""

import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from fastdiff.checkpoint.async_saves import AsyncSaves
from fastdiff.checkpoint.manifest import committed
from fastdiff.training.callbacks.base import Callback, Callbacks
from fastdiff.training.checkpoints import Checkpoints
from fastdiff.training.loop import take_steps
from fastdiff.training.state import TrainState
from fastdiff_bench.measure.session import StepTimer
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.trainers import ours

_KIND = "checkpoint"


@dataclass(slots=True)
class Cycle:
    """Seconds of the parts of one cycle."""

    quiet: list[float] = field(default_factory=list)
    """Steps while nothing is written."""
    beside: list[float] = field(default_factory=list)
    """Steps that began while a save was being written."""
    pause: float = 0.0
    """Pause of the training for the copy to the host."""
    save: float = 0.0
    """Time from the copy until the checkpoint was known to be committed, after a step."""
    blocking: float = 0.0
    """A step together with a save that it waits for."""

    @property
    def slow_down(self) -> float:
        """Slow-down of a step by a concurrent save."""
        return statistics.median(self.beside) / statistics.median(self.quiet)

    @property
    def slow_down_by_waiting(self) -> float:
        """Slow-down of a step by a save that it waits for."""
        return self.blocking / statistics.median(self.quiet)

    @property
    def cost(self) -> float:
        """Cost of a concurrent save, as the number of steps lost."""
        quiet = statistics.median(self.quiet)
        return (self.pause + sum(self.beside)) / quiet - len(self.beside)


def cycles(fact: object) -> list[Cycle]:
    """Read the fact ``cycles`` without the first cycle, which is the warm-up."""
    return [Cycle(**one) for one in json.loads(str(fact))[1:]]


def run(timer: StepTimer, workload: Workload, data: Path, place: Path | None, quiet: int) -> None:
    """Repeat cycles until ``Enough``; each counts as a step of the session.

    Facts: ``parameters``, ``cycles`` (a JSON list), ``bytes`` of a checkpoint.

    Args:
        timer: of this process.
        workload: what to train.
        data: folder of shards that fit its model.
        place: folder of the checkpoints; None: the system's folder for temporary files.
        quiet: steps without a save in each cycle.
    """
    with ours.building(timer, workload, data, place) as (built, folder):
        state = built.state
        with AsyncSaves(state.world, allowed=0) as background:
            timer.ready(parameters=ours.parameters_of(state))
            checkpoints = Checkpoints(folder / "checkpoints", 2, background.world)
            take_steps(state, built.batches, Callbacks([_Cycles(timer, checkpoints, background, folder, quiet)]))


class _Cycles(Callback):
    """Callback that measures every step and then takes the next action of the cycle."""

    def __init__(
        self, timer: StepTimer, checkpoints: Checkpoints, background: AsyncSaves, folder: Path, quiet: int
    ) -> None:
        self._timer, self._checkpoints, self._background = timer, checkpoints, background
        self._folder, self._quiet = folder, quiet
        self._done: list[Cycle] = []
        self._cycle = Cycle()
        self._stage = self._in_quiet
        self._began = self._now()
        self._save_began = 0.0

    def on_step(self, state: TrainState) -> None:
        """Record the step, and act."""
        self._stage(state, self._now() - self._began)
        self._began = self._now()

    def _in_quiet(self, state: TrainState, seconds: float) -> None:
        self._cycle.quiet.append(seconds)
        if len(self._cycle.quiet) < self._quiet:
            return
        before = self._now()
        draft = self._checkpoints.draft(state)
        self._save_began = self._now()
        self._cycle.pause = self._save_began - before
        self._background.begin(_KIND, draft.step, partial(self._checkpoints.commit, draft))
        self._stage = self._in_save

    def _in_save(self, state: TrainState, seconds: float) -> None:
        self._cycle.beside.append(seconds)
        if any(state.world.gather(self._background.running)):  # between two steps, outside their times
            return
        self._background.wait(_KIND)
        self._cycle.save = self._now() - self._save_began
        self._stage = self._in_blocking

    def _in_blocking(self, state: TrainState, seconds: float) -> None:
        before = self._now()
        self._checkpoints.commit(self._checkpoints.draft(state))
        self._cycle.blocking = seconds + self._now() - before
        self._done.append(self._cycle)
        self._cycle, self._stage = Cycle(), self._in_quiet
        files = committed(self._folder / "checkpoints")[0].iterdir()
        self._timer.facts["bytes"] = sum(file.stat().st_size for file in files)
        self._timer.facts["cycles"] = json.dumps([asdict(cycle) for cycle in self._done])
        self._timer.after_step()

    def _now(self) -> float:
        if self._timer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
