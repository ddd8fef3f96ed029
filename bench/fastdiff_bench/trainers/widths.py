"""Networks of several widths on the digits, with muP and without it: each run in a process of its own."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import read_record
from fastdiff.config.sections.data import ValidationConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.data.encoding.builtin import encode_digits
from fastdiff.data.shards.format import INFO_FILE
from fastdiff.evaluation import validation_files
from fastdiff.files import publish
from fastdiff_bench.trainers import tiny_run
from fastdiff_bench.trainers.recipes import HELD_OUT, TRAIN

HEAD = 32
"""Channels of a head at every width."""
NETWORK = DiTConfig(depth=2, hidden=HEAD, heads=1, patch=2, channels=1, size=8, classes=10)
"""At the narrowest width."""
BATCH = 16
_HELD_OUT = 512
"""Samples of the validation at the end."""
_RESULT = "width.json"
"""File of a run folder, written last."""


def at_width(config: DiTConfig, hidden: int, base: int) -> DiTConfig:
    """Return the network at another width, with heads of the same width; ``base``: of muP, 0: without it."""
    return replace(config, hidden=hidden, heads=hidden // config.head_width, base_width=base)


@dataclass(frozen=True, slots=True)
class Trial:
    """A run: equal order of the samples and noise for equal seeds."""

    width: int
    base: int
    """Of muP; 0: without it."""
    rate: float
    seed: int
    steps: int

    @property
    def case(self) -> str:
        """What is compared."""
        return f"digits, {self.steps} steps of {BATCH}"

    @property
    def method(self) -> str:
        """With muP or without."""
        return "muP" if self.base else "one rate"

    @property
    def name(self) -> str:
        """The method, the width and the learning rate."""
        return f"{self.method}, width {self.width}, lr 2^{math.log2(self.rate):g}"

    def folder(self, root: Path) -> Path:
        """Return the folder of the run."""
        return tiny_run.folder_of(self, root / "runs")

    def config(self, root: Path) -> RunConfig:
        """Return the run on the data below ``root``."""
        data = root / "digits"
        common = tiny_run.config_of(
            self.folder(root), at_width(NETWORK, self.width, self.base), AdamWConfig(lr=self.rate), data=data / TRAIN,
            validation=ValidationConfig(data=str(data / HELD_OUT), samples=_HELD_OUT, every=self.steps),
            steps=self.steps, batch=BATCH, seed=self.seed,
        )  # fmt: skip
        return replace(common, objective=FlowConfig())


@dataclass(frozen=True, slots=True)
class Trained:
    """What a finished run leaves."""

    trial: Trial
    loss: float
    """Held-out loss of the averaged weights at the end; infinite: the run failed."""
    commit: str | None
    """Of the code that trained it; None: not known."""


def prepare(root: Path) -> None:
    """Write the digits below ``root``, as far as they are not there."""
    for split, name in (("train", TRAIN), ("test", HELD_OUT)):
        if not (root / "digits" / name / INFO_FILE).is_file():
            encode_digits(root / "digits" / name, split=split)


def finished(trial: Trial, root: Path) -> Trained | None:
    """Read what a run has left; None: it is not finished."""
    folder = trial.folder(root)
    if not (folder / _RESULT).is_file():
        return None
    last = validation_files.read(folder, validation_files.steps_of(folder)[-1])
    return Trained(trial, float(last.loss.mean()), read_record(folder)["git"])


def run(trial: Trial, root: Path) -> None:
    """Train to the end; then remove the checkpoint."""
    folder = trial.folder(root)
    tiny_run.run(trial.config(root))
    publish(folder / _RESULT, b"{}")
    shutil.rmtree(folder / "checkpoints")  # 16 bytes per parameter
