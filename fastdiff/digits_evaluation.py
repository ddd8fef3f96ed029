"""What a run on digits has learned, measured: the digits that it draws, or those that it enlarges."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.data.shards import DatasetInfo
from fastdiff.data.sources import DIGITS_SOURCE, digits_source
from fastdiff.errors import ConfigError
from fastdiff.evaluation import (
    enlarged_bicubic,
    evaluate_digits,
    evaluate_enlarged,
    evaluation_labels,
    scans,
)
from fastdiff.grid import image_grid
from fastdiff.network import null_label
from fastdiff.noise.low_res import small_images
from fastdiff.trained import CLASS_CFG, Drawing, TrainedRun

_DRAWS = 8
"""Images that are drawn for each small one."""
_COLUMNS = 16


def evaluate_run(run: TrainedRun) -> dict[str, Any]:
    """Draw with the averaged weights, judge, and write ``evaluation.json`` into the folder of the run.

    Of a run with classes 500 digits (``evaluate_digits``); of one that enlarges, 8 enlargements of each of the 382
    scans of the split ``test`` (``evaluate_enlarged``), some of them also into ``enlarged.png``.

    Raises:
        ConfigError: the run was trained on something else, or in a way that has no measure.
    """
    source = DatasetInfo.read(run.config.data.path).provenance.source
    if not source.startswith(DIGITS_SOURCE):
        raise ConfigError(
            f"{run.folder}: there is no built-in evaluation for data from {source!r}, only for digits; "
            "`fastdiff sample` draws images for your own"
        )
    result = _evaluate_enlarged(run, source) if run.model.low_res_size else _evaluate_drawn(run)
    temporary = run.folder / "evaluation.json.tmp"
    temporary.write_text(json.dumps(result, indent=2) + os.linesep)
    temporary.replace(run.folder / "evaluation.json")
    return result


def _evaluate_drawn(run: TrainedRun) -> dict[str, Any]:
    if not run.known_classes:
        raise ConfigError(
            f"{run.folder}: a model without classes has no digits to be asked for; measure its samples with `fastdiff "
            "evaluate SAMPLES --reference REAL`"
        )
    labels = evaluation_labels()
    cfg = CLASS_CFG if run.config.objective.condition_dropout else 1.0
    images = run.draw(labels, scheduler="dpmsolver++", steps=20, cfg=cfg, seed=0, progress=True)
    return evaluate_digits(images, labels)


def _evaluate_enlarged(run: TrainedRun, source: str) -> dict[str, Any]:
    if source != digits_source("train"):
        raise ConfigError(
            f"{run.folder} was trained on {source!r}, also on the scans that its enlargements are measured on; encode "
            "the others for training: fastdiff encode digits FOLDER --split train"
        )
    real, labels = scans("test")
    small = small_images(real, run.model.low_res_size, noise=0.0, seed=0, position=torch.arange(len(real)))
    condition, null = {"low_res": small.repeat_interleave(_DRAWS, 0)}, {}
    if run.known_classes:
        condition["label"] = labels.repeat_interleave(_DRAWS)
        null = {"label": null_label(run.config)}
    drawing = Drawing(scheduler="dpmsolver++", steps=20, cfg=1.0)
    drawn = run.sample(condition, null, drawing).view(len(small), _DRAWS, *real.shape[1:])
    result = evaluate_enlarged(drawn, real, small, labels)
    _picture(small, drawn, real).save(run.folder / "enlarged.png")
    return result


def _picture(small: Tensor, drawn: Tensor, real: Tensor) -> Any:
    """Row by row: the small images, bicubic, one drawn, the mean of all drawn, the scans."""
    rows = [F.interpolate(small, size=8), enlarged_bicubic(small), drawn[:, 0], drawn.mean(1), real]
    return image_grid(torch.cat([row[:_COLUMNS] for row in rows]), rows=len(rows))
