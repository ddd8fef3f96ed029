"""The digits trained in bf16 or FP8, in a process of its own, because it lowers the width from which FP8 is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastdiff.checkpoint.manifest import committed
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import read_record
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.data.loading.batches import Normaliser
from fastdiff.data.shards.reader import LatentReader
from fastdiff.diffusion.objective import Objective
from fastdiff.evaluation import validation_files
from fastdiff.evaluation.validation_files import Validated
from fastdiff.evaluation.validation_set import read_batch, spread
from fastdiff.files import publish
from fastdiff.models import delayed_scales, fp8
from fastdiff.models.build import Model, build_model
from fastdiff.models.delayed_scales import MARGIN
from fastdiff.models.load import null_label
from fastdiff_bench.trainers import tiny_run
from fastdiff_bench.trainers.rounded import ROUNDINGS, convert
from fastdiff_kernels.fp8.values import MULTIPLE

_HEAD = 64
"""Features of an attention head."""
_RATE = 0.256
"""Learning rate times width: 2e-3 of the preset at a width of 128."""
_MEASURED = 64
"""Samples whose gradients are compared."""
_STD = 0.05
"""Of random weights."""
_CPU = torch.device("cpu")
_ERRORS = "gradient-errors.json"
"""File of a run folder, written last."""


BASELINE = "bf16"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How the blocks of a run multiply."""

    performance: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``PerformanceConfig``."""
    margin: float = MARGIN
    """Of the scales."""
    against: tuple[str, ...] = (BASELINE,)
    """Arithmetics that its losses are compared with, by name."""

    @property
    def is_control(self) -> bool:
        """Whether the scales are too small, so that a test of the losses should find it."""
        return self.margin < MARGIN


_FP8 = {"fp8": True, "fp8_ends": 0}
_WEIGHT_GRADIENTS_IN_BF16 = "fp8, dW in bf16"
ARITHMETICS = {
    BASELINE: Arithmetic(against=()),
    "fp8": Arithmetic(_FP8, against=(BASELINE, _WEIGHT_GRADIENTS_IN_BF16)),
    _WEIGHT_GRADIENTS_IN_BF16: Arithmetic({**_FP8, "fp8_weight_gradients": "bf16"}),
    **{f"fp8, margin {margin:g}": Arithmetic(_FP8, margin) for margin in (1, 1 / 2)},
}
"""By name. All blocks are in FP8, also those at the ends. The last are controls: scales are powers of two, so that a
margin lets values grow to 1 to 2 times itself times the largest of the window, and clips what exceeds that."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A run: equal data, noise and initial weights for equal seeds."""

    width: int
    depth: int
    steps: int
    batch: int
    seed: int
    arithmetic: str

    @property
    def network(self) -> DiTConfig:
        """The network."""
        heads = max(1, self.width // _HEAD)
        return DiTConfig(depth=self.depth, hidden=self.width, heads=heads, patch=2, channels=1, size=8, classes=10)

    @property
    def case(self) -> str:
        """What runs that are compared have in common, but for the seed."""
        return f"digits, width {self.width}, depth {self.depth}, {self.steps} steps of {self.batch}"

    @property
    def name(self) -> str:
        """The arithmetic."""
        return self.arithmetic

    def folder(self, root: Path) -> Path:
        """Return the folder of the run."""
        return tiny_run.folder_of(self, root)

    def config(self, root: Path) -> RunConfig:
        """Return the run on the data in ``root``."""
        common = tiny_run.config_of(
            self.folder(root), self.network, AdamWConfig(lr=_RATE / self.width), data=root / "train",
            validation=ValidationConfig(data=str(root / "test"), every=self.steps),
            steps=self.steps, batch=self.batch, seed=self.seed,
        )  # fmt: skip
        performance = PerformanceConfig(precision="bf16", **ARITHMETICS[self.arithmetic].performance)
        return replace(common, performance=performance)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a finished run leaves."""

    trial: Trial
    validated: Validated
    """The losses at its end, by sample."""
    gradient_errors: dict[str, dict[str, float]]
    """Of the baseline, by weights, trained and random ones, and arithmetic; otherwise empty."""
    commit: str | None
    """Of the code that trained it; None: not known."""


def finished(trial: Trial, root: Path) -> Trained | None:
    """Read what a run has left; None: it is not finished."""
    folder = trial.folder(root)
    if not (folder / _ERRORS).is_file():
        return None
    errors = json.loads((folder / _ERRORS).read_text(encoding="utf-8"))
    return Trained(trial, validation_files.read(folder, trial.steps), errors, read_record(folder)["git"])


def run(trial: Trial, root: Path) -> None:
    """Train to the end, or what is left of it; then remove the checkpoints.

    Args:
        trial: the run.
        root: folder of the data and the runs.
    """
    folder = trial.folder(root)
    with lowered(ARITHMETICS[trial.arithmetic].margin):
        tiny_run.run(trial.config(root))
    errors = {}
    if trial.arithmetic == BASELINE:
        trained = Checkpoint(committed(folder / "checkpoints")[0]).weights()
        weights = {"trained": trained, "random": random_weights(trial)}
        errors = {name: gradient_errors(trial, found, root / "train") for name, found in weights.items()}
    publish(folder / _ERRORS, json.dumps(errors).encode())
    shutil.rmtree(folder / "checkpoints")  # 16 bytes per parameter


@contextmanager
def lowered(margin: float = MARGIN) -> Iterator[None]:
    """Take FP8 at any width, with scales of this margin."""
    before = fp8.LEAST, delayed_scales.MARGIN
    fp8.LEAST, delayed_scales.MARGIN = MULTIPLE, margin
    try:
        yield
    finally:
        fp8.LEAST, delayed_scales.MARGIN = before


def gradient_errors(trial: Trial, weights: Mapping[str, Tensor], data: Path) -> dict[str, float]:
    """Return the relative errors of all gradients against fp32, of the loss of some samples.

    Args:
        trial: says what the network is.
        weights: fp32, by name.
        data: folder of shards.

    Returns:
        By arithmetic and by ``ROUNDINGS``, the norm of the difference over that of the gradients in fp32.
    """
    exact = _pass(trial, _network(trial, weights, torch.float32), data)
    found = {name: _gradients(trial, weights, data, arithmetic) for name, arithmetic in ARITHMETICS.items()}
    for name, rounding in ROUNDINGS.items():
        model = _network(trial, weights, torch.bfloat16)
        convert(model, rounding)
        found[name] = _pass(trial, model, data)
    return {name: float((gradients - exact).norm() / exact.norm()) for name, gradients in found.items()}


def random_weights(trial: Trial) -> dict[str, Tensor]:
    """Return weights of which none is zero, unlike those of a new network; a function of the seed."""
    generator = torch.Generator().manual_seed(trial.seed)
    return {
        name: torch.empty(parameter.shape).normal_(std=_STD, generator=generator)
        for name, parameter in build_model(trial.network).named_parameters()
    }


def _network(trial: Trial, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Model:
    model = build_model(trial.network)
    model.load_state_dict(weights, strict=False)  # without buffers
    return model.to(dtype)


def _gradients(trial: Trial, weights: Mapping[str, Tensor], data: Path, arithmetic: Arithmetic) -> Tensor:
    """Return all gradients, joined; with scales from the maxima of the same samples."""
    model = _network(trial, weights, torch.bfloat16)
    if not arithmetic.performance:
        return _pass(trial, model, data)
    with lowered(arithmetic.margin):
        fp8.convert(model, PerformanceConfig(precision="bf16", **arithmetic.performance), _CPU)
        _pass(trial, model, data)
        model.scales.end_step(lambda largest: largest, applied=True)
        model.scales.end_warm_up()
        return _pass(trial, model, data)


def _pass(trial: Trial, model: Model, data: Path) -> Tensor:
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    objective = Objective(
        trial.config(data).objective,
        seed=trial.seed,
        null={"label": null_label(trial.network)},
        device=_CPU,
        dtype=dtype,
    )
    with LatentReader(data) as reader:
        chosen = spread(len(reader), _MEASURED)
        batch = read_batch(reader, chosen, np.arange(len(chosen)), Normaliser(reader.info, _CPU))
    corruption = objective.add_noise(batch)
    prediction = model(corruption.noisy, corruption.time, **corruption.condition)
    objective.loss(prediction, batch, corruption).mean().backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
