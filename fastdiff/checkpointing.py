"""When checkpoints are made: beside the training when due, and for certain at its end."""

from __future__ import annotations

from functools import partial

from fastdiff.background import ANY_NUMBER, Background
from fastdiff.callbacks import Callback
from fastdiff.checkpoint import Checkpoints
from fastdiff.progress import Every
from fastdiff.state import TrainState

_WHAT = "checkpoint"


class Checkpointing(Callback):
    """Begins a checkpoint when due, and commits one at the end.

    Args:
        state: the run.
        checkpoints: over the ranks of ``background``.
        background: writes them, and snapshots.
    """

    def __init__(self, state: TrainState, checkpoints: Checkpoints, background: Background) -> None:
        self._every = Every(state.config.output.checkpoint_every)
        self._checkpoints = checkpoints
        self._background = background
        self._restored = state.progress.steps

    def on_step(self, state: TrainState) -> None:
        """Save when due.

        Raises:
            StorageError: on every rank: saves failed more often than --output.failed_saves allows.
        """
        if state.tally.failed_save:
            self._background.wait_for_all()
        if self._every.due(state.progress):
            self._background.wait(_WHAT)
            self._begin(state)
        state.failed_save = self._background.failed

    def on_end(self, state: TrainState) -> None:
        """Save the last step, unless it is saved.

        Raises:
            StorageError: on every rank: this step, or a snapshot that was being written, could not be saved.
        """
        self._save_now(state)
        self._background.wait_for_all(0)

    def on_preempted(self, state: TrainState) -> None:
        """Save this step, unless it is saved; a snapshot that fails meanwhile only leads to a warning.

        Raises:
            StorageError: on every rank: this step could not be saved.
        """
        self._save_now(state)
        self._background.wait_for_all(ANY_NUMBER)

    def _save_now(self, state: TrainState) -> None:
        self._background.wait(_WHAT, ANY_NUMBER)  # what failed may succeed now
        if state.progress.steps != (self._background.committed(_WHAT) or self._restored):
            self._begin(state)
        self._background.wait(_WHAT, 0)

    def _begin(self, state: TrainState) -> None:
        draft = self._checkpoints.draft(state)
        self._background.begin(_WHAT, draft.step, partial(self._checkpoints.commit, draft))
