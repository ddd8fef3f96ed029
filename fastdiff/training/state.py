"""State of a run in memory, shared by the loop, the callbacks and the checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.config.run import RunConfig
from fastdiff.data.loading.order import SampleOrder
from fastdiff.data.loading.training_set import Data
from fastdiff.diffusion.objective import Objective
from fastdiff.json_lines import JsonLines, drop_records_after
from fastdiff.parallel.heartbeat import Heartbeat
from fastdiff.parallel.world import World
from fastdiff.patient_files import WholeFiles
from fastdiff.progress import Progress
from fastdiff.training.ema import Ema
from fastdiff.training.engine import Engine
from fastdiff.training.guard import StepGuard
from fastdiff.training.metrics import Meters


@dataclass(slots=True)
class TrainState:
    """Everything that a step, a callback or a checkpoint needs; ``progress`` and ``applied`` change with every step."""

    config: RunConfig
    world: World
    engine: Engine
    objective: Objective
    ema: Ema
    meters: Meters
    reader: Data
    order: SampleOrder
    facts: dict[str, Any]
    """Facts of the run in every manifest: configuration, data set, versions."""
    progress: Progress
    heart: Heartbeat
    guard: StepGuard
    files: WholeFiles
    """Whole files of the run folder, written by rank 0."""
    applied: bool = True
    """False if the last step was skipped."""

    def json_lines(self, name: str) -> JsonLines:
        """Return a file of the run folder without records of later steps; called by all ranks, rank 0 writes to it.

        Raises:
            StorageError: on every rank: the file cannot be read or replaced.
        """
        path = self.folder / name
        self.world.on_first(lambda: drop_records_after(path, self.progress.steps))
        return JsonLines(path, patient=self.config.output.failed_saves > 0)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.output.folder)
