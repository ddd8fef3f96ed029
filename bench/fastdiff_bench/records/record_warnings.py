"""Reservations about measurements: a smoke run, unsteady repetitions, a busy machine.

A smoke run shows that a benchmark runs, and no ratio of it is shown. The others are shown with their reason, and no
verdict rests on them.
"""

import shlex
from collections.abc import Iterable

from fastdiff_bench.records.fingerprint import Fingerprint
from fastdiff_bench.records.number_format import number
from fastdiff_bench.records.record import Measurement, Record

SMOKE = "smoke: not a measurement"
UNSTEADY = 2.0
"""Ratio of p80 to p20 above which the repetitions say too little."""
BUSY = 0.75
"""Load average per processor, before the measurement, above which other programs took part of the machine."""

_RATIOS = ("speed-up", "over compile")
_MOST_LINES = 6


def is_smoke(one: Record) -> bool:
    """Return whether a record is of ``--smoke``; older ones say so by their command or their folder."""
    by_name = one.path.parent.name.endswith("-smoke") or "--smoke" in shlex.split(one.fingerprint.command)
    return one.fingerprint.smoke or by_name


def is_ratio(measurement: Measurement) -> bool:
    """Return whether it compares two programs, or two forms of a step."""
    quantity = measurement.quantity
    return quantity in _RATIOS or quantity.startswith(("ratio of ", "cost of ")) or " / " in quantity


def unsteady(measurement: Measurement) -> str:
    """Return why the repetitions say too little: ``p80 is 2.4 times p20``; empty if they agree."""
    return "" if measurement.p20 is None else too_wide(*measurement.interval)


def too_wide(p20: float, p80: float) -> str:
    """Return ``unsteady`` for this range."""
    return f"p80 is {number(p80 / p20)} times p20" if p80 > UNSTEADY * p20 > 0 else ""


def busy(fingerprint: Fingerprint) -> str:
    """Return what else used the machine: ``load average 1.6 per processor``; empty if nothing did or is known."""
    load = fingerprint.load
    return f"load average {number(load)} per processor before it began" if load is not None and load > BUSY else ""


def of_terminal(fingerprint: Fingerprint, measurements: Iterable[Measurement]) -> list[str]:
    """Return the last lines of a benchmark in the terminal: what its numbers are not good for."""
    lines = [f"{SMOKE}; the same command without --smoke measures"] if fingerprint.smoke else []
    if reason := busy(fingerprint):
        lines.append(f"doubtful: {reason}; measure again on an idle machine")
    found = [m for m in measurements if unsteady(m) and not m.quantity.startswith("phase ")]
    if fingerprint.smoke:
        found = [m for m in found if not is_ratio(m)]
    lines += [f"doubtful: {m.provider}, {m.quantity} ({m.case}): {unsteady(m)}" for m in found[:_MOST_LINES]]
    if more := len(found) - _MOST_LINES:
        lines += [f"doubtful: {more} more"] if more > 0 else []
    return lines
