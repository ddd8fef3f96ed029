"""State of a run in memory, shared by the loop, the callbacks and the checkpoints."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdiff.buffered_writes import WholeFiles
from fastdiff.config.run import RunConfig
from fastdiff.data.loading.order import SampleOrder
from fastdiff.data.loading.training_set import Data
from fastdiff.diffusion.objective import Objective
from fastdiff.json_lines import JsonLines, drop_records_after
from fastdiff.ledger.writer import Ledger
from fastdiff.models.delayed_scales import Scales
from fastdiff.parallel.heartbeat import Heartbeat
from fastdiff.parallel.world import World
from fastdiff.progress import Progress
from fastdiff.training.ema import Ema
from fastdiff.training.engines.base import Engine
from fastdiff.training.forward_backward.micro_batch import ForwardBackward
from fastdiff.training.guard import StepGuard
from fastdiff.training.metrics import Meters
from fastdiff.training.statistics.inputs import InputStatistics


@dataclass(slots=True)
class TrainState:
    """Everything that a step, a callback or a checkpoint needs; ``progress`` and ``applied`` change with every step."""

    config: RunConfig
    world: World
    engine: Engine
    objective: Objective
    scales: Scales
    ema: Ema
    meters: Meters
    reader: Data
    order: SampleOrder
    metadata: dict[str, Any]
    """Metadata of the run in every manifest: configuration, data set, versions."""
    progress: Progress
    heartbeat: Heartbeat
    guard: StepGuard
    ledger: Ledger
    forward_backward: ForwardBackward
    inputs: InputStatistics
    files: WholeFiles
    """Whole files of the run folder, written by rank 0."""
    applied: bool = True
    """False if the last step was skipped."""
    first_pass_bytes: int = 0
    """Bytes by which the first forward and backward pass raised the peak of this rank's memory; 0: not measured."""
    lines: dict[str, JsonLines] = field(default_factory=dict)
    """Open files of JSON lines in the run folder by name, written by rank 0."""

    def json_lines(self, name: str) -> JsonLines:
        """Return a file of the run folder; called by all ranks, rank 0 writes to it. StorageError on all: it cannot.

        It is opened once, without the records of later steps, and stays open through every rewind: the run continues
        behind the spike, so that its records stay, also those that wait for room on the disk.
        """
        if name not in self.lines:
            path = self.folder / name
            self.world.on_rank0(lambda: drop_records_after(path, self.progress.steps))
            self.lines[name] = JsonLines(path, buffered=self.config.output.failed_saves > 0)
        return self.lines[name]

    def retry_writes(self) -> None:
        """Write the files that wait for room on the disk, as far as there is some; called by rank 0."""
        self.files.retry()
        for lines in self.lines.values():
            lines.retry()

    def begin_step(self) -> None:
        """Make the next forward passes those of the step behind the samples so far."""
        if self.objective.routing is not None:
            self.objective.routing.begin_step(self.progress.samples)

    def close(self) -> None:
        """Close the files of JSON lines."""
        for lines in self.lines.values():
            lines.close()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.output.folder)
