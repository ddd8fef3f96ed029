"""Snapshots of the power-function averages while training, from which ``posthoc_ema`` makes those of other widths."""

from __future__ import annotations

import torch

from fastdiff.callbacks import Callback
from fastdiff.checkpoint import common_manifest, sliced
from fastdiff.commit import StepFolders
from fastdiff.progress import Every
from fastdiff.saved import committed, power_name, snapshot_folder, step_of
from fastdiff.state import TrainState

DTYPE = torch.float16
"""Half the room of fp32, as in EDM2. The coefficients of a reconstruction add up to 1 and are small for widths between
those that are there, so that its rounding is about that of an export in fp16: 2^-12 of each weight on average."""


class Snapshots(Callback):
    """Commits ``RUN/ema/step-N`` when due; none is ever pruned.

    Those of steps that a resumed run takes again are removed with the first of these, so that all that are there belong
    to one course of the weights, and a start that fails loses none. (A snapshot goes before the checkpoint of its step:
    a kill between the two loses neither.)
    """

    def __init__(self, state: TrainState) -> None:
        self._every = Every(state.config.ema.snapshot_every)
        self._folder = snapshot_folder(state.folder)
        self._folders = StepFolders(self._folder, state.world, "a snapshot of the averages")
        self._start: int | None = state.progress.steps
        """Step after which this process goes on; None once a step is taken."""

    def on_step(self, state: TrainState) -> None:
        """Save when due.

        Raises:
            StorageError: on every rank, if any rank could not write.
        """
        if self._start is not None:
            start, self._start = self._start, None
            state.world.on_first(lambda: self._remove_after(start))
        if not self._every.due(state.progress):
            return
        kinds = {f"ema/{name}": state.ema.averages[name] for name in map(power_name, state.ema.power_stds)}
        tensors, starts = sliced(state.engine.flats, kinds)
        manifest = common_manifest(state) | {"ema_rates": []}
        self._folders.save(state.progress.steps, tensors, starts, manifest, DTYPE)

    def _remove_after(self, step: int) -> None:
        self._folders.remove([folder for folder in committed(self._folder) if step_of(folder) > step])
