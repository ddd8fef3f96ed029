"""The numbers of a run that are compared: means of its log over windows of steps, and its recorded statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastdiff.diffusion.snr_bins import BINS
from fastdiff.json_lines import Record, read_records

STATISTICS = "statistics.jsonl"
"""File of the run folder with statistics after few steps."""
LOG = "metrics.jsonl"
LOGGED = ("loss", *(f"loss_snr_{n:02d}" for n in range(BINS)), "grad_norm", "lr")
"""Columns of the log that are compared."""
_FEWEST = 5
"""Lines of the log in the shortest window."""
_GROWTH = 0.25
"""Share of the steps before it that a window has at least."""

Window = tuple[int, int]
"""Steps after the first number, up to the second one."""
Place = tuple[str, int]
"""A number of a run: its name, and the step after which it is known."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of one run."""

    value: float
    error: float | None
    """Standard error from inside the run; None: unknown."""


Numbers = dict[Place, Number]


def windows_of(steps: Sequence[int]) -> list[Window]:
    """Return windows of the steps of a log: each has ``_FEWEST`` lines or more, and grows with the run."""
    found: list[Window] = []
    begin, lines = 0, 0
    for step in steps:
        lines += 1
        if lines >= _FEWEST and step - begin >= _GROWTH * begin:
            found.append((begin, step))
            begin, lines = step, 0
    return found


def read_numbers(run: Path, windows: Iterable[Window]) -> Numbers:
    """Return the numbers of a run, as far as it is; OSError: a file cannot be read."""
    found = dict(_of_log(read_records(run / LOG), windows))
    for record in read_records(run / STATISTICS):
        found |= _of_statistics(record)
    return found


def logged_steps(run: Path) -> list[int]:
    """Return the steps of the log; OSError: it cannot be read."""
    return [int(record["step"]) for record in read_records(run / LOG)]


def _of_log(records: Sequence[Record], windows: Iterable[Window]) -> Iterator[tuple[Place, Number]]:
    """Yield the means over the windows whose steps are all in the log."""
    steps = [int(record["step"]) for record in records]
    begins = [0, *steps]
    for begin, end in windows:
        inside = [
            record for record, start in zip(records, begins, strict=False) if start >= begin and record["step"] <= end
        ]
        if not inside or not steps or steps[-1] < end:
            continue
        for name in LOGGED:
            values = [float(value) for record in inside if isinstance(value := record.get(name), int | float)]
            if values:
                yield (name, end), mean_of(values)


def mean_of(values: Sequence[float]) -> Number:
    """Return the mean of consecutive values, with an error from the differences of neighbours, which a trend leaves."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Number(mean, None)
    variance = float((np.diff(values) ** 2).sum()) / (2 * (count - 1))
    return Number(mean, math.sqrt(variance / count))


def _of_statistics(record: Record) -> Numbers:
    """Return the numbers of a line of statistics; what is no number, as after a fault of the disk, is left out."""
    values, step = record.get("values"), int(record["step"])
    found: Numbers = {}
    for name, pair in values.items() if isinstance(values, dict) else ():
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | float):
            error = float(pair[1]) if isinstance(pair[1], int | float) else None
            found[name, step] = Number(float(pair[0]), error)
    return found
