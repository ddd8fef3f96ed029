"""What was measured, in one form for all benchmarks, and the files that keep it.

A record is a file of JSON lines: first ``{"fingerprint": ...}``, then one ``{"measurement": ...}`` or
``{"failure": ...}`` per line. It lies in a folder ``bench/results/<machine>/<date>_<what>/`` as ``<command>.jsonl``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from bench import BenchError
from bench.fingerprint import ROOT, STRICT, Fingerprint, machine
from bench.timing import Timing

Fact = str | int | float | bool | None
Line = TypeVar("Line")
Better = Literal["lower", "higher", "neither"]

RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One quantity of one contestant in one case.

    ``bench``, ``case``, ``provider`` and ``quantity`` together name it: two records are compared where these agree.
    """

    __pydantic_config__: ClassVar = STRICT

    bench: str
    """The command: op, step, peer, data, scale, aot."""
    case: str
    """What was measured, in words that stay the same from run to run: ``dit-s-2, batch 8, fp32``."""
    provider: str
    """Who: ``triton``, ``fastdiff zero3``, ``diffusers``, ``webdataset``."""
    quantity: str
    """``time``, ``throughput``, ``peak allocated``."""
    unit: str
    """``us``, ``samples/s``, ``GiB``; ``1`` for a ratio or a count."""
    value: float
    """The median, if it was repeated."""
    p20: float | None = None
    """20 % of the repetitions were no larger; None: it was not repeated."""
    p80: float | None = None
    n: int = 1
    """Repetitions."""
    better: Better
    """Which way is an improvement."""
    facts: dict[str, Fact] = field(default_factory=dict)
    """The settings behind the case and the provider, one by one, for tables and plots."""

    @property
    def name(self) -> tuple[str, str, str, str]:
        """What names it among the records."""
        return self.bench, self.case, self.provider, self.quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A contestant that is wrong, does not run or is not installed."""

    __pydantic_config__: ClassVar = STRICT

    bench: str
    case: str
    provider: str
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """One file, read."""

    path: Path
    fingerprint: Fingerprint
    measurements: tuple[Measurement, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class _FingerprintLine:
    __pydantic_config__: ClassVar = STRICT
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class _MeasurementLine:
    __pydantic_config__: ClassVar = STRICT
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class _FailureLine:
    __pydantic_config__: ClassVar = STRICT
    failure: Failure


_FIRST = TypeAdapter(_FingerprintLine)
_REST: TypeAdapter[_MeasurementLine | _FailureLine] = TypeAdapter(_MeasurementLine | _FailureLine)


class Log:
    """A record while it is written: each line is on disk as soon as it is there."""

    def __init__(self, path: Path) -> None:
        """Open ``path``, replacing what it held, in a new folder if need be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self._write("fingerprint", Fingerprint.here())

    def write(self, row: Measurement | Failure) -> None:
        """Append one line."""
        self._write("measurement" if isinstance(row, Measurement) else "failure", row)

    def _write(self, kind: str, row: Fingerprint | Measurement | Failure) -> None:
        self._file.write(json.dumps({kind: asdict(row)}, allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def folder(out: Path | None, what: str) -> Path:
    """Where the records of a command go: ``out``, or a folder named after machine, day and what was measured."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return out if out is not None else RESULTS / machine() / f"{today}_{what}"


def measured(timing: Timing, scale: float = 1.0) -> dict[str, float | int | None]:
    """The fields ``value``, ``p20``, ``p80`` and ``n`` of a measurement from what a stopwatch says, times ``scale``."""
    return {
        "value": timing.median * scale, "p20": timing.p20 * scale, "p80": timing.p80 * scale, "n": timing.repetitions,
    }  # fmt: skip


def files(path: Path) -> list[Path]:
    """The record files of a folder, or the one that ``path`` is.

    Raises:
        BenchError: there is none.
    """
    found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not found or not all(file.is_file() for file in found):
        raise BenchError(f"{path}: no record; expected a .jsonl file that `python -m bench` wrote, or a folder of them")
    return found


def read(path: Path) -> Record:
    """Read one file and hold every line against the types above.

    Raises:
        BenchError: it is not a record, with the first line that is wrong.
    """
    lines = path.read_text(encoding="utf-8").splitlines() or [""]
    first = _parsed(_FIRST, lines[0], f"{path}, line 1")
    rows = [_parsed(_REST, line, f"{path}, line {number}") for number, line in enumerate(lines[1:], 2)]
    return Record(
        path,
        first.fingerprint,
        tuple(row.measurement for row in rows if isinstance(row, _MeasurementLine)),
        tuple(row.failure for row in rows if isinstance(row, _FailureLine)),
    )


def _parsed(adapter: TypeAdapter[Line], line: str, where: str) -> Line:
    try:
        return adapter.validate_json(line, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        raise BenchError(
            f"{where}: not a record of `python -m bench`: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        ) from None


def read_all(paths: Sequence[Path]) -> list[Record]:
    """Read all records of these files and folders."""
    return [read(file) for path in paths for file in files(path)]
