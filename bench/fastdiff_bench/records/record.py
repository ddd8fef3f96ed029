"""Format of measurements, shared by all benchmarks, and the files that store them.

A record is a file of JSON lines: first ``{"fingerprint": ...}``, then one ``{"measurement": ...}`` or ``{"failure":
...}`` per line. It is stored as ``bench/results/<machine>/<date>_<what>/<command>.jsonl``.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Tag, TypeAdapter, ValidationError

from fastdiff_bench import BenchError
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.records.fingerprint import CLONE, ROOT, STRICT, Fingerprint, machine

Fact = str | int | float | bool | None
Better = Literal["lower", "higher", "neither"]

RESULTS = ROOT / "bench" / "results"
"""Folder of new records."""
PUBLISHED = RESULTS if CLONE else Path(__file__).parents[1] / "results"
"""Records of the project: a wheel has them inside the package."""
_OF_A_RUN = {"step", "loss"}
_MODULE = re.compile(r"^python -m bench ")
"""How older records begin their command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One quantity of one provider in one case.

    ``bench``, ``case``, ``provider`` and ``quantity`` identify it: comparisons join two records on these.
    """

    __pydantic_config__: ClassVar = STRICT

    bench: str
    """The command: op, step, peer, scripts, startup, data, scale, checkpoint, aot, emit, objectives, features, fp8,
    recipes, alignment."""
    case: str
    """Measured case, in words that are stable between runs: ``dit-s-2-256, batch 8, fp32``."""
    provider: str
    """Measured implementation: ``triton``, ``fastdiff zero3``, ``diffusers``, ``webdataset``."""
    quantity: str
    """``time``, ``throughput``, ``peak allocated``."""
    unit: str
    """``us``, ``samples/s``, ``GiB``; ``1`` for a ratio or a count."""
    value: float
    """The median of repeated measurements."""
    p20: float | None = None
    """20th percentile of the repetitions; None: not repeated."""
    p80: float | None = None
    n: int = 1
    """Repetitions."""
    better: Better
    """Direction of an improvement."""
    facts: dict[str, Fact] = field(default_factory=dict)
    """Settings of the case and the provider, one by one, for tables and plots."""

    @classmethod
    def of(
        cls, bench: str, case: str, provider: str, quantity: str, unit: str, value: Timing | float, better: Better,
        *, scale: float = 1.0, facts: Mapping[str, Fact] | None = None,
    ) -> Measurement:  # fmt: skip
        """Return a measurement of ``value`` times ``scale``, with the spread and the repetitions of a timing."""
        row = partial(
            cls, bench=bench, case=case, provider=provider, quantity=quantity, unit=unit, better=better,
            facts=dict(facts or {}),
        )  # fmt: skip
        if not isinstance(value, Timing):
            return row(value=scale * value)
        p20, p80 = scale * value.p20, scale * value.p80
        return row(value=scale * value.median, p20=p20, p80=p80, n=value.repetitions)

    @property
    def interval(self) -> tuple[float, float]:
        """``p20`` and ``p80``; both equal the value if it was not repeated."""
        return (self.value if self.p20 is None else self.p20, self.value if self.p80 is None else self.p80)

    @property
    def name(self) -> tuple[str, str, str, str]:
        """Key that identifies it among the records."""
        return self.bench, self.case, self.provider, self.quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A provider that is incorrect, does not run or is not installed."""

    __pydantic_config__: ClassVar = STRICT

    bench: str
    case: str
    provider: str
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """Content of one record file."""

    path: Path
    fingerprint: Fingerprint
    measurements: tuple[Measurement, ...]
    failures: tuple[Failure, ...]

    @property
    def benches(self) -> list[str]:
        """The commands of its lines, each once."""
        return list(dict.fromkeys([*(m.bench for m in self.measurements), *(f.bench for f in self.failures)]))


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


def _kind(line: Any) -> str:
    return str(next(iter(line), "")) if isinstance(line, dict) else ""


_Line: TypeAlias = _FingerprintLine | _MeasurementLine | _FailureLine
_LINE: TypeAdapter[_Line] = TypeAdapter(
    Annotated[
        Annotated[_FingerprintLine, Tag("fingerprint")]
        | Annotated[_MeasurementLine, Tag("measurement")]
        | Annotated[_FailureLine, Tag("failure")],
        Discriminator(
            _kind, custom_error_type="kind", custom_error_message="expected a fingerprint, a measurement or a failure"
        ),
    ]
)


class Log:
    """An open record; each line is flushed at once."""

    def __init__(self, path: Path, *, smoke: bool = False) -> None:
        """Open ``path``, replacing an existing file and creating its folder; ``smoke`` marks it as no measurement."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.fingerprint = Fingerprint.here(smoke=smoke)
        self.measurements: list[Measurement] = []
        self._file = path.open("w", encoding="utf-8")
        self._write("fingerprint", self.fingerprint)

    def write(self, *rows: Measurement | Failure) -> None:
        """Append a line for each.

        Raises:
            ValueError: a number is not finite, or a field has the wrong type, so the line could not be read again.
        """
        for row in rows:
            if isinstance(row, Measurement):
                self.measurements.append(row)
            self._write("measurement" if isinstance(row, Measurement) else "failure", row)

    def _write(self, kind: str, row: Fingerprint | Measurement | Failure) -> None:
        line = json.dumps({kind: asdict(row)})
        _LINE.validate_json(line, strict=True)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def folder(what: str, place: str | None = None) -> Path:
    """Return the folder of a new record: ``<place>/<date>_<what>`` of the results; None: the name of this machine."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return RESULTS / (place or machine()) / f"{today}_{what}"


def files(path: Path) -> list[Path]:
    """Return the record files of a folder, or ``path`` itself if it is a file.

    The ``metrics.jsonl`` of a training run is ignored; any other file of JSON lines counts as a record, so that a
    damaged one is detected.

    Raises:
        BenchError: there is none.
    """
    found = sorted(f for f in path.rglob("*.jsonl") if not _of_a_run(f)) if path.is_dir() else [path]
    if not found or not all(file.is_file() for file in found):
        raise BenchError(f"{path}: no record; expected a .jsonl file that `fastdiff bench` wrote, or a folder of them")
    return found


def kept() -> list[Path]:
    """Return all record files of ``bench/results`` and of the project, except those of ``--smoke``."""
    alone = RESULTS == PUBLISHED or not any(RESULTS.rglob("*.jsonl"))
    folders = [PUBLISHED] if alone else [PUBLISHED, RESULTS]
    return [file for folder in folders for file in files(folder) if not file.parent.name.endswith("-smoke")]


def _of_a_run(path: Path) -> bool:
    """Return whether a file begins like the metrics of a training run."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    try:
        keys = json.loads(first)
    except json.JSONDecodeError:
        return False
    return isinstance(keys, dict) and keys.keys() >= _OF_A_RUN


def read(path: Path) -> Record:
    """Read one file and validate every line against the types above.

    Raises:
        BenchError: it is not a record; the message names the first invalid line.
    """
    lines = path.read_bytes().split(b"\n")
    rows = [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line]
    first = rows[0] if rows else None
    if not isinstance(first, _FingerprintLine) or any(isinstance(row, _FingerprintLine) for row in rows[1:]):
        raise BenchError(f"{path}: not a record of `fastdiff bench`: expected one fingerprint, in the first line")
    return Record(
        path,
        replace(first.fingerprint, command=_MODULE.sub("fastdiff bench ", first.fingerprint.command)),
        tuple(row.measurement for row in rows if isinstance(row, _MeasurementLine)),
        tuple(row.failure for row in rows if isinstance(row, _FailureLine)),
    )


def _parsed(line: bytes, where: str) -> _Line:
    try:
        return _LINE.validate_json(line, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"][1:]))
        raise BenchError(
            f"{where}: not a record of `fastdiff bench`: {place}{': ' if place else ''}{problem['msg']}"
        ) from None


def read_all(paths: Sequence[Path]) -> list[Record]:
    """Read all records of these files and folders, sorted by date."""
    return sorted((read(file) for path in paths for file in files(path)), key=lambda one: one.fingerprint.date)


def by_provider(measurements: Iterable[Measurement]) -> dict[tuple[str, str], dict[str, Measurement]]:
    """Group the measurements of one bench by case and provider, then by quantity; of duplicates the last counts."""
    found: dict[tuple[str, str], dict[str, Measurement]] = {}
    for one in measurements:
        found.setdefault((one.case, one.provider), {})[one.quantity] = one
    return found
