"""Comparison of counts, which have no spread, with earlier records."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdiff_bench import BenchError
from fastdiff_bench.records import record
from fastdiff_bench.records.record import Measurement
from fastdiff_bench.records.tables import table

_UNLIKE = {"1/element": 0.02, "us": 0.02}
"""Share by which counts of instructions and the times of them may differ, by their units; all others are exact."""


def _differ(old: float, new: Measurement) -> bool:
    return new.better != "neither" and abs(new.value - old) > _UNLIKE.get(new.unit, 0.0) * abs(old)


def add_baseline(parser: argparse.ArgumentParser) -> None:
    """Add ``--baseline``."""
    what = "record file, or folder with the newest record: fail if anything is worse"
    parser.add_argument("--baseline", type=Path, metavar="RECORD", help=what)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Records of counts, restricted to what is counted now."""

    path: Path
    git: str
    """Commit of the newest record."""
    measurements: tuple[Measurement, ...]

    @classmethod
    def read(cls, path: Path, bench: str, counted: Callable[[Measurement], bool]) -> Baseline:
        """Read a record, or of a folder the newest that has a kernel or a block, for each.

        Raises:
            BenchError: there is no record, or it lacks these cases.
        """
        records = [r for r in record.read_all([path]) if any(m.bench == bench for m in r.measurements)]
        if not records:
            raise BenchError(f"--baseline {path}: no record of `fastdiff bench {bench}`; make one with --out")
        of_these = [r for r in records if any(map(counted, r.measurements))]
        if not of_these:
            raise BenchError(f"--baseline {path}: has none of the cases that are counted now; choose others")
        of_these.sort(key=lambda r: r.fingerprint.date)
        by_case: dict[tuple[str, str], list[Measurement]] = {}
        for one in of_these:
            found: dict[tuple[str, str], list[Measurement]] = {}
            for m in filter(counted, one.measurements):
                found.setdefault((m.case, m.provider), []).append(m)
            by_case |= found
        newest = of_these[-1]
        return cls(newest.path, newest.fingerprint.git, tuple(m for rows in by_case.values() for m in rows))

    def compare(self, now: Sequence[Measurement]) -> tuple[str, bool]:
        """Describe the changes and return whether anything got worse; new and removed kernels never count as worse."""
        before, after = ({m.name: m for m in rows} for rows in (self.measurements, now))
        rows = []
        for name, new in after.items():
            if name in before and _differ(old := before[name].value, new):
                verdict = "worse" if (new.value > old) == (new.better == "lower") else "better"
                rows.append((new.provider, new.case, new.quantity, f"{old:g}", f"{new.value:g}", verdict))
        lines = [f"against {self.path} ({self.git})"]
        if rows:
            lines.append(table([("kernel", "case", "quantity", "before", "now", ""), *rows], "<<<>><"))
        for word, own, others in (("new", after, before), ("gone", before, after)):
            kernels = {(provider, case) for _, case, provider, _ in own}
            kernels -= {(provider, case) for _, case, provider, _ in others}
            lines += [f"{word}: {provider} ({case})" for provider, case in sorted(kernels)]
        worse = sum(row[-1] == "worse" for row in rows)
        lines.append(f"{worse} worse, {len(rows) - worse} better, {len(after.keys() & before.keys())} compared")
        return "\n".join(lines), worse > 0
