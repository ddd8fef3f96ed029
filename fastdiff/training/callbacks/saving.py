"""Callbacks that save checkpoints and snapshots: in the background when due, and synchronously at the end."""

import time
from functools import partial
from pathlib import Path

import torch

from fastdiff.checkpoint.async_saves import ANY_NUMBER, AsyncSaves
from fastdiff.checkpoint.manifest import committed, step_of
from fastdiff.checkpoint.power_function import power_name
from fastdiff.checkpoint.reader import snapshot_folder
from fastdiff.checkpoint.step_folders import StepFolders
from fastdiff.parallel.world import World
from fastdiff.progress import Every
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.checkpoints import Checkpoints, common_manifest, sliced
from fastdiff.training.state import TrainState

CHECKPOINT = "checkpoint"
"""The kind of a save, besides snapshots."""


class Checkpointing(Callback):
    """Periodic checkpoints in the background, and one at the end.

    Args:
        state: the run.
        checkpoints: over the ranks of ``background``.
        background: writes checkpoints and snapshots.
    """

    account = "save"

    def __init__(self, state: TrainState, checkpoints: Checkpoints, background: AsyncSaves) -> None:
        output = state.config.output
        self._every = Every(output.checkpoint_every)
        self._most_s = 60 * output.checkpoint_minutes if output.checkpoint_every else 0.0
        self._saved_s = time.monotonic()
        self._checkpoints = checkpoints
        self._background = background

    def on_step(self, state: TrainState) -> None:
        """Save when due; StorageError on every rank after more failures than --output.failed_saves allows."""
        if state.guard.flags.failed_save:
            self._background.wait_for_all()
        if self._every.due(state.progress) or state.guard.flags.save_due:
            self._background.wait(CHECKPOINT)
            begin_checkpoint(state, self._checkpoints, self._background)
            self._saved_s = time.monotonic()
        state.guard.failed_save = self._background.failed
        # The other ranks hear of it with the flags of the next step: one clock decides for all.
        state.guard.save_due = state.world.is_first and 0 < self._most_s < time.monotonic() - self._saved_s

    def on_end(self, state: TrainState) -> None:
        """Save the last step, unless already saved; StorageError on every rank if it, or a snapshot, was not."""
        self._save_now(state)
        self._background.wait_for_all(0)

    def on_preempted(self, state: TrainState) -> None:
        """Save this step, unless already saved, or StorageError on every rank; a failed snapshot is a warning."""
        self._save_now(state)
        self._background.wait_for_all(ANY_NUMBER)

    def _save_now(self, state: TrainState) -> None:
        self._background.wait(CHECKPOINT, ANY_NUMBER)  # a failed save is tried again
        if state.progress.steps != self._background.committed(CHECKPOINT):
            begin_checkpoint(state, self._checkpoints, self._background)
        self._background.wait(CHECKPOINT, 0)


def begin_checkpoint(state: TrainState, checkpoints: Checkpoints, background: AsyncSaves) -> None:
    """Start to save this step, while no save is running; called by all ranks. StorageError on all: no memory for it."""
    draft = checkpoints.draft(state)
    background.begin(CHECKPOINT, draft.step, partial(checkpoints.commit, draft))


def save_checkpoint(state: TrainState, checkpoints: Checkpoints, background: AsyncSaves) -> None:
    """Save this step and wait; called by all ranks, with no save running. StorageError on all: too many failures."""
    begin_checkpoint(state, checkpoints, background)
    background.wait(CHECKPOINT)


_SNAPSHOT = "snapshot"
DTYPE = torch.float16
"""Half the size of fp32, as in EDM2. The coefficients of a reconstruction add up to 1 and are small for stds between
the stored ones, so that its rounding is about that of an export in fp16: 2^-12 of each weight on average."""


class Snapshots(Callback):
    """Periodic snapshots of the averages in ``RUN/ema/step-N``; none is ever pruned.

    A resumed run deletes newer snapshots at its first step, so that all of them belong to one history of the weights,
    and a failed start loses none. (The snapshot of a step precedes its checkpoint: a kill between the two loses
    neither.)

    Args:
        state: the run.
        background: writes snapshots and checkpoints; ``Checkpointing`` reports failures, and waits for the last save.
    """

    account = "save"

    def __init__(self, state: TrainState, background: AsyncSaves) -> None:
        self._every = Every(state.config.ema.snapshot_every)
        self._background = background
        self._folders = _folders(state.folder, background.world, state.config.output.pinned_gib)
        self._start: int | None = state.progress.steps
        """Step at which this process started; None after its first step."""

    def on_step(self, state: TrainState) -> None:
        """Save when due; StorageError on every rank after more failures than --output.failed_saves allows."""
        if self._start is not None:
            start, self._start = self._start, None
            remove_after(state, start)
        if self._every.due(state.progress):
            self._background.wait(_SNAPSHOT)
            self._begin(state)

    def _begin(self, state: TrainState) -> None:
        kinds = {f"ema/{name}": state.ema.averages[name] for name in map(power_name, state.ema.power_stds)}
        tensors, starts = sliced(state.engine.flats, kinds)
        manifest = common_manifest(state) | {"ema_rates": []}
        draft = self._folders.draft(state.world, state.progress.steps, tensors, starts, manifest, DTYPE)
        self._background.begin(_SNAPSHOT, draft.step, partial(self._folders.commit, draft))


def remove_after(state: TrainState, step: int) -> None:
    """Delete snapshots after ``step``; called by all ranks, while none is written. StorageError on all: one is left."""

    def remove() -> None:
        found = committed(snapshot_folder(state.folder))
        _folders(state.folder, state.world).remove([folder for folder in found if step_of(folder) > step])

    state.world.on_rank0(remove)


def _folders(run: Path, world: World, pinned_gib: float = 0.0) -> StepFolders:
    return StepFolders(snapshot_folder(run), world, "a snapshot of the averages", pinned_gib)
