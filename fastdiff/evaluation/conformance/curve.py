"""Published curves of the loss as references: a CSV with the columns step and loss, and error where it is known."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdiff.errors import ConfigError, require
from fastdiff.evaluation.conformance.comparison import (
    Conformance,
    Difference,
    conclude,
    two_sided,
)
from fastdiff.evaluation.conformance.numbers import Number, mean_of, windows_of
from fastdiff.files import read_bounded
from fastdiff.json_lines import read_records

_COLUMNS = ("step", "loss", "error")
_LARGEST = 1 << 26
_READING = 0.01
"""Relative error of a curve without a column of errors, as read off a picture."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a curve."""

    step: int
    loss: float
    error: float | None


def read_curve(path: Path) -> list[Point]:
    """Read a curve, in the order of its steps.

    Raises:
        ConfigError: a column is missing or unknown, or a cell is no finite number.
        OSError: the file cannot be read.
    """
    try:
        rows = csv.DictReader(io.StringIO(read_bounded(path, _LARGEST).decode()))
        names = list(rows.fieldnames or ())
        require(
            {"step", "loss"} <= set(names) <= set(_COLUMNS),
            f"{path}: columns {', '.join(names) or 'none'}; expected step, loss and, if known, error in the first line",
        )
        found = [_point(row, path, number) for number, row in enumerate(rows, start=2)]
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: no CSV ({error})") from None
    require(bool(found), f"{path}: no line below the names of the columns")
    return sorted(found, key=lambda point: point.step)


def _point(row: dict[str, str | None], path: Path, number: int) -> Point:
    try:
        step, loss = float(row["step"] or ""), float(row["loss"] or "")
        error = float(row["error"] or "") if "error" in row else None
        if not all(map(math.isfinite, (step, loss, error or 0.0))) or step < 0 or (error is not None and error < 0):
            raise ValueError
    except (TypeError, ValueError):
        cells = ", ".join(str(row.get(name)) for name in _COLUMNS if name in row)
        raise ConfigError(
            f"{path}, line {number}: {cells}; expected finite numbers, step and error not negative"
        ) from None
    return Point(round(step), loss, error)


def compare_with_curve(run: Path, curve: Sequence[Point]) -> Conformance:
    """Compare the loss of a run's log with a published curve, over windows of the log (``numbers.windows_of``).

    The errors are those of the run's mean over the window, and of the points in it: their own, or 1 % as read off a
    picture. How far seeds lie apart no curve tells, so a curve of one run and a run with another seed may differ by
    more. Only windows with a point are compared. OSError: the log cannot be read.
    """
    records = [record for record in read_records(run / "metrics.jsonl") if isinstance(record.get("loss"), int | float)]
    steps = [int(record["step"]) for record in records]
    found = []
    for begin, end in windows_of(steps):
        values = [float(record["loss"]) for record in records if begin < record["step"] <= end]
        points = [point for point in curve if begin < point.step <= end]
        if points:
            found.append(_difference(end, mean_of(values), len(values), points))
    later = sum(point.step > (steps[-1] if steps else 0) for point in curve)
    return conclude(found, count=len(found) + later)


def _difference(step: int, here: Number, lines: int, points: Sequence[Point]) -> Difference:
    expected = math.fsum(point.loss for point in points) / len(points)
    known = [point.error for point in points if point.error is not None]
    published = math.sqrt(math.fsum(error**2 for error in known)) / len(known) if known else _READING * abs(expected)
    deviation = math.hypot(here.error or 0.0, published)
    difference = here.value - expected
    sigmas = difference / deviation if deviation else math.copysign(math.inf, difference) if difference else 0.0
    return Difference(("loss", step), here.value, expected, sigmas, two_sided(sigmas, lines - 1))
