"""A run in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.config import RunConfig
from fastdiff.data.order import SampleOrder
from fastdiff.dist import World
from fastdiff.ema import Ema
from fastdiff.engine import Engine
from fastdiff.metrics import Meters
from fastdiff.objective import Objective
from fastdiff.progress import Progress
from fastdiff.training_data import Data


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
    """What every manifest records of the run: configuration, data set, versions."""
    progress: Progress
    applied: bool = True
    """False if the last step was skipped."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.output.folder)
