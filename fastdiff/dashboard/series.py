"""Columns of ``metrics.jsonl``, thinned for a page."""

import math
import secrets
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.json_lines import Record

_MOST_COLUMNS = 200
_DIGITS = 6
"""Significant digits of a number on the page."""
_CLOCKS = ("step", "samples")
"""Columns whose last value stands for a bucket; the others have their mean, and a band from minimum to maximum."""


class Series:
    """The records of a run as columns of float64; a field that a record lacks, or null, is NaN."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all records."""
        self.generation = secrets.token_hex(4)
        """Name of this sequence of records; what a page has of another one is void."""
        self.count = 0
        self._columns: dict[str, array[float]] = {"step": array("d")}

    def add(self, record: Record) -> None:
        """Append a record; one whose step is not above the last is left out."""
        step = float(record["step"])
        if not math.isfinite(step) or (self.count and step <= self._columns["step"][-1]):
            return
        for name, column in self._columns.items():
            value = record.get(name)
            is_finite = type(value) is float and -math.inf < value < math.inf  # of millions of values, nearly all
            column.append(value if is_finite else _number(value))  # type: ignore[arg-type]  # a float, as tested
        if not record.keys() <= self._columns.keys():
            self._add_columns(record)
        self.count += 1

    def _add_columns(self, record: Record) -> None:
        for name, value in record.items():
            if name not in self._columns and isinstance(value, int | float) and len(self._columns) < _MOST_COLUMNS:
                self._columns[name] = array("d", [math.nan] * self.count + [_number(value)])

    def since(self, first: int) -> dict[str, Any]:
        """Return the records from number ``first`` on, each as a bucket of its own."""
        chosen = {name: np.array(column[first:]) for name, column in self._columns.items()}
        return {name: {"mean": _rounded(values)} for name, values in chosen.items()}

    def thinned(self, most: int) -> dict[str, Any]:
        """Return at most ``most`` buckets of successive records: ``mean``, ``min`` and ``max`` of each by column."""
        if self.count <= most:
            return self.since(0)
        starts = np.arange(most) * self.count // most
        found = {}
        for name, column in self._columns.items():
            values = np.array(column)
            if name in _CLOCKS:
                found[name] = {"mean": _rounded(values[np.append(starts[1:], self.count) - 1])}
            else:
                found[name] = _bands(values, starts)
        return found


def _bands(values: npt.NDArray[np.float64], starts: npt.NDArray[np.int64]) -> dict[str, Any]:
    known = ~np.isnan(values)
    counts = np.add.reduceat(known.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        means = np.add.reduceat(np.where(known, values, 0.0), starts) / counts
    ends = {"min": np.fmin.reduceat(values, starts), "max": np.fmax.reduceat(values, starts)}
    return {"mean": _rounded(means), **{name: _rounded(found) for name, found in ends.items()}}


def _number(value: object) -> float:
    """Return a field as a number, NaN if it is none."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def _rounded(values: npt.NDArray[np.float64]) -> list[float | None]:
    """Return JSON numbers; what is not finite is null, and whole numbers keep all their digits."""
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | None:
    if not math.isfinite(value):  # also a mean whose sum is beyond the range of a float
        return None
    return int(value) if value == int(value) else float(f"{value:.{_DIGITS}g}")


def finite(value: object) -> float | None:
    """Return a field of foreign origin as a number, None if it is none."""
    found = _number(value)
    return None if math.isnan(found) else int(found) if isinstance(value, int) else found


def plain(value: Any) -> Any:
    """Return JSON values of foreign origin with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(inner) for inner in value]
    return value
