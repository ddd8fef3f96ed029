"""References: the numbers of one or several runs of a recipe, in one JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fastdiff.config.run_record import read_record
from fastdiff.errors import ConfigError, require
from fastdiff.evaluation.conformance.numbers import (
    Number,
    Place,
    Window,
    logged_steps,
    read_numbers,
    windows_of,
)
from fastdiff.files import read_bounded
from fastdiff.json_lines import MALFORMED, parsed

_FORMAT = 1
_LARGEST = 1 << 26
"""Bytes of the largest reference that is read."""
_DIGITS = 5
_FOLDER = Path(__file__).with_name("references")


@dataclass(frozen=True, slots=True)
class Expected:
    """A number of the runs of a reference."""

    mean: float
    spread: float | None
    """Standard deviation between the runs; None: there is one run."""
    error: float | None
    """Standard error of one run, from inside it; None: unknown."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What runs of a recipe have in common."""

    name: str
    """Of the file."""
    runs: int
    seeds: tuple[int, ...]
    config: Mapping[str, Any]
    """Configuration of the first run; the others differ from it in the seed, or in what changes no result."""
    windows: tuple[Window, ...]
    """Windows of the log (``numbers.windows_of``)."""
    expected: Mapping[Place, Expected]


def make(runs: Sequence[Path]) -> Reference:
    """Return the reference of runs of one configuration, which differ in the seed.

    Raises:
        ConfigError: a folder has no run or no line of the log, or the runs have no line in common.
        StorageError: a file cannot be read.
    """
    records = [read_record(run) for run in runs]
    steps = [logged_steps(run) for run in runs]
    for run, logged in zip(runs, steps, strict=True):
        require(bool(logged), f"{run}: no line in metrics.jsonl yet; train it first")
    windows = windows_of(sorted(set(steps[0]).intersection(*steps[1:])))
    require(
        bool(windows),
        f"{', '.join(map(str, runs))}: fewer than 5 lines of metrics.jsonl in common; train them longer, with equal "
        "--output.log_every",
    )
    found = [read_numbers(run, windows) for run in runs]
    places = [place for place in found[0] if all(place in numbers for numbers in found)]
    expected = {place: _expected([numbers[place] for numbers in found]) for place in places}
    seeds = tuple(int(record["config"]["seed"]) for record in records)
    return Reference("", len(runs), seeds, records[0]["config"], tuple(windows), expected)


def _expected(numbers: Sequence[Number]) -> Expected:
    values = [number.value for number in numbers]
    mean = math.fsum(values) / len(values)
    spread = None
    if len(values) > 1:
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    errors = [number.error for number in numbers if number.error is not None]
    error = math.sqrt(math.fsum(error**2 for error in errors) / len(errors)) if errors else None
    return Expected(mean, spread, error)


def encode(reference: Reference) -> bytes:
    """Return the content of the file: by name the steps, and a row ``[mean, spread, error]`` for each."""
    numbers: dict[str, dict[str, list[Any]]] = {}
    for (name, step), expected in reference.expected.items():
        row = [_rounded(value) for value in (expected.mean, expected.spread, expected.error)]
        numbers.setdefault(name, {})[str(step)] = row
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}" for name, rows in numbers.items()
    )
    head = {
        "fastdiff_reference": _FORMAT,
        "runs": reference.runs,
        "seeds": reference.seeds,
        "config": reference.config,
        "windows": reference.windows,
    }
    return f'{json.dumps(head)[:-1]},\n "numbers": {{\n{lines}\n }}}}\n'.encode()


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def read(path: Path) -> Reference:
    """Read a reference.

    Raises:
        ConfigError: the file is none, or of a newer version.
        OSError: it cannot be read.
    """
    try:
        content = parsed(read_bounded(path, _LARGEST))
        version = content["fastdiff_reference"]
        require(version == _FORMAT, f"{path}: format {version} of references; this fastdiff reads {_FORMAT}")
        expected = {
            (str(name), int(step)): Expected(*_row(row))
            for name, rows in content["numbers"].items()
            for step, row in rows.items()
        }
        windows = tuple((int(begin), int(end)) for begin, end in content["windows"])
        seeds = tuple(int(seed) for seed in content["seeds"])
        found = Reference(path.stem, int(content["runs"]), seeds, dict(content["config"]), windows, expected)
    except MALFORMED as error:
        raise ConfigError(
            f"{path}: no reference ({type(error).__name__}: {error}); expected the file of `fastdiff reference make`, "
            "or a .csv with the columns step and loss"
        ) from None
    return found


def _row(row: Sequence[Any]) -> tuple[float, float | None, float | None]:
    mean, spread, error = (None if value is None else float(value) for value in row)
    if mean is None:
        raise ValueError("a mean is null")
    return mean, spread, error


@cache
def shipped(name: str) -> Reference | None:
    """Return the reference of a preset that comes with fastdiff, or None."""
    path = _FOLDER / f"{name}.json"
    return read(path) if path.is_file() else None


def shipped_names() -> list[str]:
    """Return the presets with a reference."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))
