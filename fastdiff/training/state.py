"""State of a run in memory, shared by the loop, the callbacks and the checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.config.run import RunConfig
from fastdiff.data.loading.order import SampleOrder
from fastdiff.data.loading.training_set import Data
from fastdiff.diffusion.objective import Objective
from fastdiff.parallel.heartbeat import Heartbeat
from fastdiff.parallel.world import World
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
    applied: bool = True
    """False if the last step was skipped."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.output.folder)
