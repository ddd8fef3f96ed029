"""Picture of the loss by noise level over the steps, for the trackers."""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.console import log
from fastdiff.diffusion.snr_bins import BINS
from fastdiff.json_lines import Record, each_record
from fastdiff.progress import Every
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.build import Trackers
from fastdiff.training.trackers.tags import range_of

_COLUMNS = 240
"""Largest number of columns; each is the mean of consecutive records."""
_CELL = 14
"""Height of a row in pixels."""
_LABELS = 110
_GROWTH = 1.1
"""Smallest ratio of the steps of a picture and the one before: all of them together read the log a few times."""
_STOPS = np.array([[13, 8, 135], [126, 3, 168], [204, 71, 120], [248, 149, 64], [240, 249, 33]], dtype=np.float64)
"""Colours from the smallest to the largest loss."""


class LossMap(Callback):
    """Heat map of the losses of ``metrics.jsonl``: one row per bin of the log SNR, one column per record or several.

    Each row has its own scale of colours, since the loss changes over the steps far less than between noise levels.
    """

    account = "sampling"

    def __init__(self, state: TrainState, trackers: Trackers) -> None:
        self._trackers = trackers
        config = state.config
        self._due = (Every(config.output.sample_every), Every(config.validation.every, config.validation.first))
        self._drawn = -1

    def on_step(self, state: TrainState) -> None:
        """Draw with a grid or a validation, if the last picture lacks a tenth of the steps."""
        grown = state.progress.steps >= _GROWTH * self._drawn
        if grown and any(every.due(state.progress) for every in self._due):
            self._draw(state)

    def on_end(self, state: TrainState) -> None:
        """Draw the last one."""
        if self._drawn != state.progress.steps:
            self._draw(state)

    def _draw(self, state: TrainState) -> None:
        self._drawn = state.progress.steps
        if state.world.is_first and self._trackers.is_open:
            values = self._values(state)
            if values.shape[1]:
                self._trackers.images({"by log SNR, over the steps": picture(values)}, self._drawn, "loss")

    def _values(self, state: TrainState) -> npt.NDArray[np.float64]:
        try:
            return by_level(each_record(state.folder / "metrics.jsonl"))
        except OSError as error:
            log.warning(f"no picture of the losses by log SNR: {error.filename}: {error.strerror}")
            return by_level([])


def by_level(records: Iterable[Record]) -> npt.NDArray[np.float64]:
    """Return the losses ``[BINS, columns]`` of records by bin, NaN without samples; neighbours are averaged."""
    rows = [[record.get(f"loss_snr_{n:02d}") for n in range(BINS)] for record in records]
    values = np.array([[math.nan if value is None else value for value in row] for row in rows], dtype=np.float64)
    values = values.reshape(-1, BINS)
    groups = np.array_split(values, min(len(values), _COLUMNS)) if len(values) else []
    columns = [_mean(group) for group in groups]
    return np.stack(columns, axis=1) if columns else np.empty((BINS, 0))


def _mean(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    finite = np.isfinite(values)
    count = finite.sum(axis=0)
    total = np.where(finite, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), math.nan)


def picture(values: npt.NDArray[np.float64]) -> Tensor:
    """Return the heat map ``[1, 3, H, W]`` uint8, with the least noise on top and the range of each row beside it."""
    from PIL import Image as pillow
    from PIL import ImageDraw

    shown = values[::-1]
    width = max(1, 480 // shown.shape[1])
    cells = _colours(shown).repeat(_CELL, axis=0).repeat(width, axis=1)
    canvas = np.full((cells.shape[0], _LABELS + cells.shape[1], 3), 255, dtype=np.uint8)
    canvas[:, _LABELS:] = cells
    image = pillow.fromarray(canvas)
    pen = ImageDraw.Draw(image)
    for row in range(BINS):
        pen.text((4, row * _CELL + 1), range_of(BINS - 1 - row), fill=(0, 0, 0))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).unsqueeze(0)


def _colours(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Return ``[rows, columns, 3]``: each row from its smallest to its largest loss, on a logarithmic scale."""
    with np.errstate(invalid="ignore", divide="ignore"):
        levels = np.log(values)
    levels[~np.isfinite(levels)] = math.nan
    shares = np.full_like(levels, math.nan)
    for row, out in zip(levels, shares, strict=True):
        known = row[np.isfinite(row)]
        if known.size:
            out[:] = (row - known.min()) / max(known.max() - known.min(), 1e-12)
    places = np.nan_to_num(shares) * (len(_STOPS) - 1)
    found = [np.interp(places, range(len(_STOPS)), _STOPS[:, channel]) for channel in range(3)]
    coloured = np.stack(found, axis=2)
    coloured[np.isnan(shares)] = 225
    return coloured.round().astype(np.uint8)
