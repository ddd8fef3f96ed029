"""``bench compare``: significant changes between two records.

A change is significant if the intervals from p20 to p80 do not overlap and the medians differ by more than a tolerance.
The interval of an unrepeated measurement is its value. Of duplicates the last counts. A measurement that is missing in
the second record counts as worse. Limits of the machine and shares of them are shown but do not count, because times
and rates already describe the code.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from fastdiff_bench import BenchError
from fastdiff_bench.arguments import Commands
from fastdiff_bench.records import record, record_warnings
from fastdiff_bench.records.number_format import interval, number
from fastdiff_bench.records.record import Failure, Measurement, Record
from fastdiff_bench.records.tables import table

Verdict = Literal["same", "changed", "better", "worse"]

_TOLERANCE_PERCENT = 3.0
_VERDICTS: tuple[Verdict, ...] = ("same", "changed", "better", "worse")
_MAY_DIFFER = {"git", "date", "command", "smoke", "load"}
_SHARES_OF_LIMITS = {"of copy", "of matmul"}
_GONE = {("step", "launches"), ("objectives", "training time")}
"""Bench and quantity of older records that nothing measures any more."""


@dataclass(frozen=True, slots=True)
class Change:
    """A measurement in both records."""

    a: Measurement
    b: Measurement
    tolerance: float
    """Tolerated difference, as a share of the first value."""

    @property
    def ratio(self) -> float:
        """Value of B over value of A."""
        if self.a.value == self.b.value:
            return 1.0
        return self.b.value / self.a.value if self.a.value else float("inf")

    @property
    def verdict(self) -> Verdict:
        """``same`` within noise or tolerance; ``changed`` if the change does not count."""
        (a20, a80), (b20, b80) = self.a.interval, self.b.interval
        if abs(self.ratio - 1) <= self.tolerance or (a20 <= b80 and b20 <= a80):
            return "same"
        if not _counts(self.a):
            return "changed"
        return "better" if (self.a.better == "higher") == (self.b.value > self.a.value) else "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two records, joined by the names of their measurements."""

    changes: tuple[Change, ...]
    only_a: tuple[Measurement, ...]
    only_b: tuple[Measurement, ...]
    new_failures: tuple[Failure, ...]
    """Failures in B of providers that did not fail in A."""
    partial: bool
    """Whether B may lack measurements of A."""

    @property
    def missing(self) -> tuple[Measurement, ...]:
        """Measurements missing in B that count as worse; if B is partial, only those that fail there."""
        return tuple(
            m
            for m in self.only_a
            if _counts(m) and (not self.partial or any(_concerns(failure, m) for failure in self.new_failures))
        )

    @property
    def worse(self) -> bool:
        """Whether anything got worse or is missing."""
        return any(change.verdict == "worse" for change in self.changes) or bool(self.missing)


def compare(a: Sequence[Record], b: Sequence[Record], *, tolerance: float, partial: bool = False) -> Comparison:
    """Join two sets of records.

    Args:
        a: the baseline, sorted by date.
        b: the records to compare with it.
        tolerance: share by which a value may differ, 0.03 for 3 %.
        partial: whether ``b`` may lack measurements of ``a``, unless they fail.

    Raises:
        BenchError: they have no measurement in common, or a common one has different units.
    """
    of_a, of_b = (
        {m.name: m for one in records for m in one.measurements if (m.bench, m.quantity) not in _GONE}
        for records in (a, b)
    )
    common = [name for name in of_a if name in of_b]
    if not common:
        raise BenchError(
            f"the records have no measurement in common: {_extent(of_a.values())} against {_extent(of_b.values())}"
        )
    for name in common:
        if of_a[name].unit != of_b[name].unit:
            raise BenchError(f"{' | '.join(name)}: {of_a[name].unit} in one, {of_b[name].unit} in the other record")
    failed_before = {(f.bench, f.case, f.provider) for one in a for f in one.failures}
    failures = (f for one in b for f in one.failures if (f.bench, f.case, f.provider) not in failed_before)
    return Comparison(
        changes=tuple(Change(of_a[name], of_b[name], tolerance) for name in common),
        only_a=tuple(m for name, m in of_a.items() if name not in of_b),
        only_b=tuple(m for name, m in of_b.items() if name not in of_a),
        new_failures=tuple(failures),
        partial=partial,
    )


def differences(a: Sequence[Record], b: Sequence[Record]) -> list[str]:
    """List differences other than the code that may explain the change, one line each."""

    def values(records: Sequence[Record], field: str) -> str:
        return " and ".join(sorted({str(asdict(one.fingerprint)[field]) for one in records}))

    both = (*a, *b)
    doubtful = [
        f"{one.path} was measured on files that differ from commit {one.fingerprint.git.removesuffix('-dirty')}"
        for one in both
        if one.fingerprint.git.endswith("-dirty")
    ]
    doubtful += [f"{one.path}: its commit is not known" for one in both if one.fingerprint.git == "unknown"]
    fields = [field for field in asdict(a[0].fingerprint) if field not in _MAY_DIFFER]
    pairs = [(field, values(a, field), values(b, field)) for field in fields]
    return [*(f"{field}: {one} against {other}" for field, one, other in pairs if one != other), *doubtful]


def report(found: Comparison) -> str:
    """Format the table for the terminal, worst changes last, and the measurements that cannot be compared."""
    changes = sorted(found.changes, key=lambda change: _VERDICTS.index(change.verdict))
    rows: list[tuple[str, ...]] = [("bench", "case", "provider", "quantity", "unit", "A", "", "B", "", "B/A", "")]
    rows += [_row(change) for change in changes]
    lines = [table(rows, "<<<<<><><><"), ""]
    for name, measurements in (("A", found.only_a), ("B", found.only_b)):
        lines += [f"only in {name}: {' | '.join(m.name)}" for m in measurements]
    lines += [f"fails in B: {f.bench} | {f.case} | {f.provider}: {f.reason}" for f in found.new_failures]
    counts = Counter(change.verdict for change in found.changes)
    summary = [*(f"{counts[verdict]} {verdict}" for verdict in reversed(_VERDICTS)), f"{len(found.missing)} missing"]
    return "\n".join([*lines, ", ".join(summary)])


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("compare")
    parser.add_argument("a", type=Path, metavar="A", help="the baseline: a record or a folder of them")
    parser.add_argument("b", type=Path, metavar="B", help="the record or folder to compare with it")
    parser.add_argument(
        "--tolerance", type=float, default=_TOLERANCE_PERCENT, metavar="PERCENT",
        help="tolerated change in addition to noise; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--partial", action="store_true", help="B may lack measurements of A; failures in B still count"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.tolerance >= 0:
        raise BenchError(f"--tolerance {arguments.tolerance}: expected a percentage, 0 or more")
    a, b = record.read_all([arguments.a]), record.read_all([arguments.b])
    if smoke := next((one.path for one in (*a, *b) if record_warnings.is_smoke(one)), None):
        raise BenchError(f"{smoke} is of --smoke, which measures nothing that could be compared")
    found = compare(a, b, tolerance=arguments.tolerance / 100, partial=arguments.partial)
    print(report(found))
    for one in (*a, *b):
        if busy := record_warnings.busy(one.fingerprint):
            print(f"warning: {one.path}: {busy}", file=sys.stderr)
    for difference in differences(a, b):
        print(f"warning: {difference}", file=sys.stderr)
    return 1 if found.worse else 0


def _counts(measurement: Measurement) -> bool:
    """Return whether it describes the code: neither a limit of the machine nor a share of one."""
    return measurement.better != "neither" and measurement.quantity not in _SHARES_OF_LIMITS


def _concerns(failure: Failure, measurement: Measurement) -> bool:
    """Return whether the failure explains the missing measurement; it may name a case without its direction."""
    return (
        failure.bench == measurement.bench
        and measurement.case.startswith(failure.case)
        and failure.provider in (measurement.provider, "every")
    )


def _extent(measurements: Iterable[Measurement]) -> str:
    return ", ".join(f"{count} of {bench}" for bench, count in Counter(m.bench for m in measurements).items()) or "none"


def _row(change: Change) -> tuple[str, ...]:
    a, b = change.a, change.b
    unit = "" if a.unit == "1" else a.unit
    values = (number(a.value), interval(a), number(b.value), interval(b), f"{change.ratio:.3f}")
    return (*a.name, unit, *values, "" if change.verdict == "same" else change.verdict)
