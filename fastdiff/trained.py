"""A finished (or running) run, opened for sampling and evaluation on one process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from fastdiff.config_file import from_mapping
from fastdiff.data.shards import DatasetInfo
from fastdiff.data.sources import DIGITS_SOURCE
from fastdiff.errors import ConfigError, StorageError
from fastdiff.model_config import DiTConfig
from fastdiff.network import build_network, null_label
from fastdiff.sampling import SchedulerName, grid_classes, sample
from fastdiff.saved import Saved, committed, problems


class TrainedRun:
    """The newest intact checkpoint of a run.

    Args:
        folder: ``runs/NAME``.
        ema: decay rate of the average to use; None: the run's first one, or the weights if it has none.

    Raises:
        ConfigError: no run, or no checkpoint, in ``folder``.
        StorageError: there are checkpoints, and none is intact.
    """

    def __init__(self, folder: Path, ema: float | None = None) -> None:
        if not (folder / "run.json").is_file():
            near = sorted(path.parent.name for path in folder.parent.glob("*/run.json"))
            hint = f"runs there: {', '.join(near)}" if near else "start one with `deepspeed fastdiff/train.py`"
            raise ConfigError(f"{folder}: no run (no run.json); {hint}")
        self.folder = folder
        saved = _newest_intact(folder / "checkpoints")
        self.config = from_mapping(saved.manifest["config"], str(saved.folder))
        self.ema = ema if ema is not None else next(iter(saved.ema_rates), None)
        self.step = int(saved.manifest["progress"]["steps"])
        self.classes: int | None = saved.manifest["classes"]
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = build_network(self.config, saved.weights(self.ema)).to(device).eval()

    @property
    def description(self) -> str:
        """Which weights are used, for messages."""
        which = "weights" if self.ema is None else f"EMA {self.ema}"
        return f"step {self.step}, {which}"

    def draw(
        self, labels: Tensor, *, scheduler: SchedulerName, steps: int, cfg: float, seed: int, progress: bool
    ) -> Tensor:
        """Return ``[N, C, H, W]`` fp32 latents on the CPU, one per label (``[N]`` int64)."""
        device, shape = next(self.model.parameters()).device, self.config.model
        return sample(
            self.model,
            self.config.objective,
            {"label": labels.to(device)},
            shape=(shape.channels, shape.size, shape.size),
            null={"label": null_label(self.config)},
            scheduler=scheduler,
            steps=steps,
            cfg=cfg,
            seed=seed,
            progress=progress,
        ).cpu()

    def draw_grid(
        self,
        path: Path,
        *,
        classes: Sequence[int] | None,
        per_class: int,
        scheduler: SchedulerName,
        steps: int,
        cfg: float,
        seed: int,
    ) -> None:
        """Write a PNG with one column per class."""
        from fastdiff.grid import image_grid

        known = self.classes or 0
        wrong = [c for c in classes or () if not 0 <= c < known]
        if wrong:
            has = f"classes 0-{known - 1}" if known else "no classes"
            raise ConfigError(f"--classes {wrong}: the model was trained with {has}")
        assert isinstance(self.config.model, DiTConfig)
        columns = torch.tensor(classes) if classes else grid_classes(self.config.model, self.classes)
        labels = columns.repeat(per_class)
        images = self.draw(labels, scheduler=scheduler, steps=steps, cfg=cfg, seed=seed, progress=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        image_grid(images, rows=per_class).save(path)

    def evaluate(self) -> dict[str, Any]:
        """Measure 500 generated images and write ``evaluation.json``; only digits have a built-in measure."""
        from fastdiff.evaluation import evaluate_digits, evaluation_labels

        source = DatasetInfo.read(self.config.data.path).provenance.source
        if source != DIGITS_SOURCE:
            raise ConfigError(
                f"{self.folder}: there is no built-in evaluation for data from {source!r}, only for digits; "
                "`fastdiff sample` draws images for your own"
            )
        labels = evaluation_labels()
        images = self.draw(labels, scheduler="dpmsolver++", steps=20, cfg=1.5, seed=0, progress=True)
        result = evaluate_digits(images, labels)
        temporary = self.folder / "evaluation.json.tmp"
        temporary.write_text(json.dumps(result, indent=2) + os.linesep)
        temporary.replace(self.folder / "evaluation.json")
        return result


def _newest_intact(checkpoints: Path) -> Saved:
    damage = []
    for folder in committed(checkpoints):
        found = problems(folder)
        if not found:
            return Saved(folder)
        tqdm.write(f"warning: passing over a damaged checkpoint: {found[0]}")
        damage += found
    if damage:
        raise StorageError(f"{checkpoints}: no checkpoint is intact ({damage[0]}); restore one from a copy")
    raise ConfigError(f"{checkpoints}: no checkpoint yet; the run must reach its first one")
