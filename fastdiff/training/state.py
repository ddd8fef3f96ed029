"""A run in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdiff.config.run import RunConfig
from fastdiff.data.loading.order import SampleOrder
from fastdiff.data.loading.training_set import Data
from fastdiff.diffusion.objective import Objective
from fastdiff.parallel.consensus import Consensus, StepFlags
from fastdiff.parallel.heartbeat import Heartbeat
from fastdiff.parallel.world import World
from fastdiff.progress import Progress
from fastdiff.training.ema import Ema
from fastdiff.training.engine import Engine
from fastdiff.training.metrics import Meters
from fastdiff.training.spikes import Spikes


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
    votes: Consensus
    heart: Heartbeat
    spikes: Spikes
    tally: StepFlags = field(default_factory=StepFlags)
    """What the ranks voted in the last step."""
    applied: bool = True
    """False if the last step was skipped."""
    failed_save: bool = False
    """True if this rank could not write its part of the save that runs beside the steps."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.output.folder)
