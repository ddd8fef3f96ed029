"""A DiT on the features of crops, by how they are stored and what it predicts, in a process of its own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import read_record
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.evaluation import validation_files
from fastdiff.evaluation.validation_files import Validated
from fastdiff_bench.trainers import tiny_run
from fastdiff_bench.trainers.crops import CHANNELS, CLASSES, HELD_OUT, SIDE

_HEAD = 16
"""Features of an attention head."""
_RATE = 2e-3
_FLOOR = 0.05
"""Smallest noise level by which an error of x0 is divided (Li & He 2025, arXiv:2511.13720)."""
PREDICTIONS = {"velocity": FlowConfig(), "x": FlowConfig(prediction="x0", velocity_floor=_FLOOR)}
"""Objectives by what the network predicts; both have the loss of the velocity."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A run: equal order of the samples, noise and initial weights for equal seeds."""

    width: int
    depth: int
    steps: int
    batch: int
    seed: int
    prediction: str
    storage: str

    @property
    def case(self) -> str:
        """What runs that are compared have in common, but for the seed."""
        return f"features of crops, width {self.width}, depth {self.depth}, {self.steps} steps of {self.batch}"

    @property
    def name(self) -> str:
        """Prediction and storage."""
        return f"{self.prediction}, {self.storage}"

    def folder(self, root: Path) -> Path:
        """Return the folder of the run."""
        return tiny_run.folder_of(self, root / "runs")

    def config(self, root: Path) -> RunConfig:
        """Return the run on the data in ``root``."""
        network = DiTConfig(
            depth=self.depth,
            hidden=self.width,
            heads=self.width // _HEAD,
            patch=1,
            channels=CHANNELS,
            size=SIDE,
            classes=len(CLASSES),
        )
        common = tiny_run.config_of(
            self.folder(root), network, AdamWConfig(lr=_RATE), data=root / self.storage.replace(" ", "-"),
            validation=ValidationConfig(data=str(root / HELD_OUT), samples=2048, every=self.steps),
            steps=self.steps, batch=self.batch, seed=self.seed,
        )  # fmt: skip
        objective, timesteps = PREDICTIONS[self.prediction], TimestepConfig(density="logit_normal")
        return replace(common, objective=objective, timesteps=timesteps)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a finished run leaves."""

    trial: Trial
    validated: Validated
    """The squared errors of the velocity at its end, by sample."""
    commit: str | None
    """Of the code that trained it; None: not known."""


def finished(trial: Trial, root: Path) -> Trained | None:
    """Read what a run has left; None: it is not finished."""
    folder = trial.folder(root)
    if not folder.is_dir() or (folder / "checkpoints").exists():
        return None
    found = in_velocity(validation_files.read(folder, trial.steps))
    return Trained(trial, found, read_record(folder)["git"])


def run(trial: Trial, root: Path) -> None:
    """Train to the end, or what is left of it; then remove the checkpoints."""
    tiny_run.run(trial.config(root))
    shutil.rmtree(trial.folder(root) / "checkpoints")  # 16 bytes per parameter


def in_velocity(found: Validated) -> Validated:
    """Return the losses as errors of the velocity, by which networks of either prediction can be compared.

    An error of x0 is ``t`` times that of the velocity; below ``_FLOOR`` it is divided by that, as in the loss of x.
    """
    t = 1 / (1 + np.exp(found.log_snr.astype(np.float64) / 2))
    about = found.about | {"objective": {}, "unit": f"squared error of the velocity, t at least {_FLOOR}"}
    return replace(found, loss=found.x0_mse / np.maximum(t, _FLOOR) ** 2, about=about)
