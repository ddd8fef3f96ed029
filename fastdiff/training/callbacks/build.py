"""Callbacks of a run, chosen by its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdiff.checkpoint.async_saves import AsyncSaves
from fastdiff.training.callbacks.base import Callback, Preempt
from fastdiff.training.callbacks.conformance import OwnReference
from fastdiff.training.callbacks.damaged_samples import DamagedSamples
from fastdiff.training.callbacks.divergence import NonFiniteGuard, SpikeGuard
from fastdiff.training.callbacks.log import Closing, Log
from fastdiff.training.callbacks.loss_map import LossMap
from fastdiff.training.callbacks.previews import SampleGrid
from fastdiff.training.callbacks.profiling import Profile
from fastdiff.training.callbacks.prompt_images import PromptImages
from fastdiff.training.callbacks.saving import Checkpointing, Snapshots
from fastdiff.training.callbacks.statistics import Statistics
from fastdiff.training.callbacks.user_defined import open_callbacks
from fastdiff.training.callbacks.validation import ValidationLoss
from fastdiff.training.checkpoints import Checkpoints
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.build import Trackers

if TYPE_CHECKING:
    from fastdiff.planning.figures import Figures


def build_callbacks(
    state: TrainState,
    checkpoints: Checkpoints,
    background: AsyncSaves,
    trackers: Trackers,
    plan: Figures | None,
    preset: str | None = None,
) -> list[Callback]:
    """Return them in the order of their calls: checkpoints first, so that a validation that fails loses no step."""
    log = Log(state, trackers, plan)
    found: list[Callback] = [NonFiniteGuard(state), log, Statistics(state)]
    if state.config.data.damaged == "skip":
        found.append(DamagedSamples(state))
    found.append(SpikeGuard(state))  # after the callbacks that also record undone steps
    checkpointing = Checkpointing(state, checkpoints, background)
    found += [Snapshots(state, background), checkpointing, Preempt()]
    if state.config.validation.data:
        found.append(ValidationLoss(state, trackers))
    if not state.config.model.text_conditional:
        found.append(SampleGrid(state, trackers))
    elif state.config.validation.prompts and state.config.validation.every:
        found.append(PromptImages(state, trackers))
    if state.config.output.report_to:
        found.append(LossMap(state, trackers))
    if state.config.performance.profile:
        found.append(Profile(state))
    found += open_callbacks(state, trackers)
    found.append(OwnReference(state, preset))
    found.append(Closing(log))
    return found
