"""All trackers of a run."""

import json
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from torch import Tensor

from fastdiff import sanitize
from fastdiff.config.run_record import as_json
from fastdiff.console import log
from fastdiff.errors import OutOfMemoryRestart, Preempted
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.background import BackgroundTracker, Tracker
from fastdiff.training.trackers.tags import shown
from fastdiff.training.trackers.tensorboard import TensorBoard
from fastdiff.training.trackers.trackio_run import TrackioRun
from fastdiff.training.trackers.wandb_run import WandbRun

BROKEN_OFF_S = 5.0
"""Timeout in seconds at the end by an error or a preemption: other ranks wait, or a scheduler is about to kill."""


class Trackers:
    """All trackers of a run, open on rank 0 through every rewind, and absent on the other ranks.

    Leaving the context closes them. ConfigError: on every rank: wandb or trackio refuses the run.
    """

    def __init__(self, state: TrainState) -> None:
        self._trackers: list[Tracker] = []
        state.world.on_rank0(lambda: self._open(state))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show the numbers of a record under their tags (``tags.shown``)."""
        for tracker in self._trackers:
            tracker.scalars({shown(name): value for name, value in values.items()}, step)

    def images(self, images: Mapping[str, Tensor], step: int, section: str = "validation") -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption, in a section."""
        for tracker in self._trackers:
            tracker.images(images, step, section)

    @property
    def is_open(self) -> bool:
        """Whether there is a tracker on this rank."""
        return bool(self._trackers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = kind is not None and not issubclass(kind, (Preempted, OutOfMemoryRestart))
        for tracker in self._trackers:
            with suppress(OSError):  # a failed write was reported when it happened
                tracker.close(failed=failed, patience_s=tracker.finish_s if kind is None else BROKEN_OFF_S)

    def _open(self, state: TrainState) -> None:
        buffered = state.config.output.failed_saves > 0
        for name in state.config.output.report_to:
            try:
                self._trackers.append(_opened(name, state, buffered=buffered))
            except OSError as error:
                if not buffered or name == "tensorboard":
                    raise
                log.warning(f"{error.filename or state.folder}: {error.strerror}; the run goes on without {name}")


def _opened(name: str, state: TrainState, *, buffered: bool) -> Tracker:
    if name == "wandb":
        return BackgroundTracker(WandbRun(state))
    if name == "trackio":
        return BackgroundTracker(TrackioRun(state))
    board = TensorBoard(state.folder, state.progress.steps, buffered=buffered)
    lines = json.dumps(sanitize.tree(as_json(state.config)), indent=2).splitlines()
    board.text("configuration", "\n".join(f"    {line}" for line in lines), state.progress.steps)
    return board
