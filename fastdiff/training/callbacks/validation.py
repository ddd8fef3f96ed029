"""Validation loss: held-out samples under noise that is the same in every run."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fastdiff.checkpoint.power_function import in_words
from fastdiff.checkpoint.weights import AS_TRAINED
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig, ObjectiveConfig, in_full
from fastdiff.console import log
from fastdiff.data.loading.batches import Normaliser
from fastdiff.data.loading.fit import require_masks, trains_masked
from fastdiff.diffusion.levels import clean_per_error
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.snr_bins import Mean, by_log_snr
from fastdiff.evaluation import validation_files
from fastdiff.evaluation.validation_files import LINES, Validated
from fastdiff.evaluation.validation_set import (
    Int64,
    batches_of,
    even_shares,
    largest_of,
    open_validation,
    read_batch,
    spread,
)
from fastdiff.json_lines import Record
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.progress import Every
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.callbacks.previews import averaged_model, memory_beside_training
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.build import Trackers

_SEED = 20_260_101
"""Seed of the noise and of the samples of a posterior: part of the definition of the validation loss, never changed."""


class ValidationLoss(Callback):
    """Loss of the averaged weights on ``--validation.data``, measured by all ranks together.

    Sample i always meets the same noise at the same noise level. The levels are spread evenly over the plain density of
    the process, and the noise is plain, whatever the training draws. Two runs on the same process and data are
    therefore compared pair by pair, and equal weights give equal losses for any seed, batch and number of ranks.
    (Weights trained on other ranks or in other micro-batches are equal only to rounding, and so are their losses.) The
    loss is that of the run in the training precision, without condition dropout, offset and multi-resolution noise,
    input perturbation and DREAM.

    It writes a line of ``validation.jsonl`` and ``validation/step-N.npz`` (``evaluation.validation_files``).
    FastdiffError: on every rank: the data cannot be read, or do not fit the model.
    """

    account = "validation"

    def __init__(self, state: TrainState, trackers: Trackers) -> None:
        world, config = state.world, state.config
        self._trackers = trackers
        self._every = Every(config.validation.every, config.validation.first)
        path, cache = config.validation.data, config.data.cache
        self._config = validated(config.objective)
        self._reader = reader = world.on_all_ranks(
            lambda: open_validation(config.model, path, cache, state.reader.info)
        )
        world.on_all_ranks(lambda: require_masks(replace(self._config, plugin=""), path, reader.info))
        self._unit = unit(self._config, masked=trains_masked(self._config, reader.info))
        self._data = reader.info.digest[:12]
        self._normalise = Normaliser(reader.info, world.device)
        self._objective = Objective(
            self._config,
            seed=_SEED,
            null={},
            device=world.device,
            # Without the position, the key of a dropout.
            inputs=None if state.objective.inputs is None else {*state.objective.inputs} - {"position"},
            posterior=reader.info.kind == "posterior",
            dtype=state.objective.dtype,
            low_res_size=state.objective.low_res_size,
        )
        self._index = spread(len(reader), config.validation.samples)
        self._levels = self._objective.process.draw(even_shares(len(self._index)).to(world.device))
        self._batches = batches_of(reader.info, self._index)
        self._lines = state.json_lines(LINES)
        self._done = world.on_rank0(lambda: self._resume_records(state))
        if self._every.due(state.progress) and 0 < state.progress.steps != self._done:
            self._validate(state)  # the run was killed between its checkpoint and its validation

    def on_step(self, state: TrainState) -> None:
        """Validate when due."""
        if self._every.due(state.progress):
            self._validate(state)

    def rehearse(self, state: TrainState) -> None:
        """Measure the largest batch with the averaged weights, and keep nothing."""
        model = averaged_model(state, DTYPES[state.config.performance.precision])
        largest = largest_of(self._reader.info, self._index, self._batches)
        state.world.on_all_ranks(lambda: self._measure(state, model, [largest]))

    def on_end(self, state: TrainState) -> None:
        """Validate the last step, unless already validated."""
        if self._done != state.progress.steps:
            self._validate(state)

    def close(self) -> None:
        """Close the data."""
        self._reader.close()

    def _resume_records(self, state: TrainState) -> int:
        """Remove the records that a resumed run repeats; return the last comparable validated step, or -1."""
        validation_files.drop_after(state.folder, state.progress.steps)
        last = self._lines.last()
        if last is None:
            return -1
        now = {"data": self._data, "val_count": len(self._index), "unit": self._unit}
        changes = [f"{name} {last.get(name)} -> {value}" for name, value in now.items() if last.get(name) != value]
        if changes:
            log.warning(
                f"{state.folder / LINES} continues with a loss that is not comparable with that up to step "
                f"{last['step']}: {', '.join(changes)}"
            )
        return -1 if changes else int(last["step"])

    def _validate(self, state: TrainState) -> None:
        self._done = state.progress.steps
        model = averaged_model(state, DTYPES[state.config.performance.precision])
        own = self._batches[state.world.rank :: state.world.size]
        found = state.world.on_all_ranks(lambda: self._measure(state, model, own))
        # Each rank has filled its part of a tensor of zeros: the sum is exact.
        losses = state.world.sum_(found).cpu().numpy()
        state.world.on_rank0(lambda: self._write(state, losses))

    @torch.no_grad()
    def _measure(self, state: TrainState, model: nn.Module, batches: Sequence[Int64]) -> Tensor:
        """Measure loss and squared error of x0 of the samples of these batches: ``[2, N]`` float64, 0 for the rest."""
        world = state.world
        found = torch.zeros(2, len(self._index), dtype=torch.float64, device=world.device)
        most = state.config.batch.per_rank(world.size)
        with memory_beside_training(state, halves=True):
            for rows in (whole[first : first + most] for whole in batches for first in range(0, len(whole), most)):
                batch = read_batch(self._reader, self._index, rows, self._normalise)
                corruption = self._objective.add_noise(batch, native=self._levels[batch.position])
                prediction = model(corruption.noisy, corruption.time, **corruption.condition)
                levels = corruption.levels
                plain = torch.ones_like(levels.weights)
                error = self._objective.squared_error(prediction, batch, corruption, plain)
                found[0, batch.position] = self._objective.loss(prediction, batch, corruption).double()
                found[1, batch.position] = (error * clean_per_error(levels.table).square()[levels.row]).double()
        return found

    def _write(self, state: TrainState, losses: npt.NDArray[np.float64]) -> None:
        """Write the file of all samples, then the line, then the numbers in the trackers."""
        levels, step = self._objective.process.levels(self._levels), state.progress.steps
        log_snr = levels.log_snr[levels.row].cpu().numpy()
        loss, x0_mse = losses
        found = Validated(self._index, log_snr, loss, x0_mse, self._about(state))
        state.files.write(validation_files.path_of(state.folder, step), validation_files.encode(found))
        total, bins = by_log_snr(log_snr, loss)
        record = {"step": step, "samples": state.progress.samples, **_record(total, bins)}
        record |= {"unit": self._unit, "data": self._data}
        self._lines.write(record)
        shown = {"val_loss": total.mean, "val_loss_se": total.error}
        shown |= {f"val_loss_snr_{n:02d}": found.mean for n, found in enumerate(bins) if found.count}
        self._trackers.scalars(shown, step)

    def _about(self, state: TrainState) -> dict[str, Any]:
        average = next(iter(state.ema.averages), None)
        return {
            "data": self._reader.info.digest,
            "seed": _SEED,
            "objective": in_full(self._config),
            "unit": self._unit,
            "precision": state.config.performance.precision,
            "weights": AS_TRAINED if average is None else in_words(average),
            "step": state.progress.steps,
        }


def validated(objective: ObjectiveConfig) -> ObjectiveConfig:
    """Return the objective without the training-only changes of input, noise and target."""
    changes: dict[str, Any] = {
        "prediction": objective.predicted,
        "weighting": objective.weighted,
        "condition_dropout": 0.0,
        "noise_offset": 0.0,
        "multires_noise_iterations": 0,
        "multires_noise_discount": 0.3,  # the value without iterations
        "low_res_noise": 0.0,
        "input_perturbation": 0.0,
        "alignment_weight": 0.0,
        "alignment_steps": 0,
    }
    if isinstance(objective, DdpmConfig):
        changes |= {"dream": False, "dream_detail_preservation": 1.0}
    if isinstance(objective, FlowConfig):
        changes |= {"contrastive_weight": 0.0}
    return replace(objective, **changes)


def unit(objective: ObjectiveConfig, *, masked: bool = False) -> str:
    """Describe the loss in words."""
    mask = ", masked" if masked else ""
    if isinstance(objective, DdpmConfig) and objective.is_bound:
        scale = "" if objective.loss == "kl" else f" times {objective.timesteps}"
        return f"bits per dimension{scale}{mask}"
    weight = "" if objective.weighted == "none" else f", weighted by {objective.weighted}"
    bound = " + variational bound" if objective.learns_variance else ""
    cosine = " + cosine distance" if isinstance(objective, FlowConfig) and objective.cosine_weight else ""
    token = objective.teacher_weight if isinstance(objective, FlowConfig) else 0.0
    teacher = f" + {token:g} times that of the class token" if token else ""
    return f"squared error of {objective.predicted}{weight}{bound}{cosine}{teacher}{mask}"


def _record(total: Mean, bins: Sequence[Mean]) -> Record:
    return {
        "val_loss": total.mean,
        "val_loss_se": total.error,
        "val_count": total.count,
        "val_loss_snr": [_finite(found.mean) for found in bins],
        "val_loss_snr_se": [_finite(found.error) for found in bins],
        "val_count_snr": [found.count for found in bins],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
