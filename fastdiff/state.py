"""A run in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdiff.config import RunConfig
from fastdiff.data.order import SampleOrder
from fastdiff.dist import World
from fastdiff.ema import Ema
from fastdiff.engine import Engine
from fastdiff.heartbeat import Heartbeat
from fastdiff.metrics import Meters
from fastdiff.objective import Objective
from fastdiff.progress import Progress
from fastdiff.spikes import Spikes
from fastdiff.training_data import Data
from fastdiff.votes import Tally, Votes


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
    votes: Votes
    heart: Heartbeat
    spikes: Spikes
    tally: Tally = field(default_factory=Tally)
    """What the ranks voted in the last step."""
    applied: bool = True
    """False if the last step was skipped."""
    failed_save: bool = False
    """True if this rank could not write its part of the save that runs beside the steps."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.output.folder)
