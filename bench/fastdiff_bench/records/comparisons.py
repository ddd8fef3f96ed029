"""Races: how many times as fast fastdiff is as another program, over all benchmarks, with a verdict."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fastdiff_bench.records import record_warnings
from fastdiff_bench.records.number_format import number
from fastdiff_bench.records.record import Measurement, Record

Verdict = Literal["faster", "slower", "no clear difference", "doubtful"]
VERDICTS: tuple[Verdict, ...] = ("faster", "slower", "no clear difference", "doubtful")

_OURS = ("triton", "auto")
"""Implementations of an op that are fastdiff's own."""
_TIMES = ("step time", "throughput", "time")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison with a rival."""

    bench: str
    case: str
    what: str
    """Compared quantity: ``step time``, ``processor time of a step, 1 core``."""
    ours: str
    rival: str
    times: float
    """Times as fast as the rival; above 1 fastdiff is faster."""
    low: float
    """20 % of the rounds did not exceed it; equals ``times`` if it was not repeated."""
    high: float
    """80 % of the rounds did not exceed it."""
    warning: str
    """Why it says nothing; empty: it does."""

    @property
    def verdict(self) -> Verdict:
        """``faster`` or ``slower`` if the whole interval is on that side of 1."""
        if self.warning:
            return "doubtful"
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "no clear difference"

    @property
    def interval(self) -> str:
        """``p20 to p80``; empty if it was not repeated."""
        return "" if self.low == self.high else f"{number(self.low)} to {number(self.high)}"


def is_ours(provider: str) -> bool:
    """Return whether a provider of a record is fastdiff's."""
    return provider.startswith("fastdiff") or provider in _OURS


def of_record(one: Record) -> list[Comparison]:
    """Return the comparisons of a record; a smoke run has none."""
    if record_warnings.is_smoke(one):
        return []
    return [found for m in one.measurements if (found := _comparison(m, one)) is not None]


def words(found: Sequence[Comparison]) -> str:
    """Return the verdict on comparisons in one sentence."""
    if not found:
        return "No record compares fastdiff with another program."
    return f"fastdiff against other programs: {counts(found)}."


def counts(found: Sequence[Comparison]) -> str:
    """Return how many comparisons have each verdict: ``faster in 20, slower in 10, no clear difference in 8 of 38``."""
    number_of = Counter(one.verdict for one in found)
    said = [f"{verdict} in {number_of[verdict]}" for verdict in VERDICTS if number_of[verdict]]
    return f"{', '.join(said)} of {len(found)}"


def span(found: Sequence[Comparison]) -> str:
    """Return the smallest and the largest speed-up: ``0.97 to 2.93 times as fast``."""
    low, high = (end(one.times for one in found) for end in (min, max))
    return f"{number(low)}{'' if low == high else f' to {number(high)}'} times as fast"


def _comparison(m: Measurement, one: Record) -> Comparison | None:
    named = _names(m)
    if named is None:
        return None
    what, ours, rival, inverse = named
    if not is_ours(ours) or is_ours(rival):
        return None
    low, high = m.interval
    value = m.value
    if inverse:
        low, value, high = (1 / end if end else math.inf for end in (high, value, low))
    reasons = [
        record_warnings.busy(one.fingerprint),
        *_unsteady((m, *_sides(m, what, (ours, rival), one.measurements))),
    ]
    return Comparison(m.bench, m.case, what, ours, rival, value, low, high, "; ".join(filter(None, reasons)))


def _names(m: Measurement) -> tuple[str, str, str, bool] | None:
    """Return the quantity, fastdiff's and the rival's name, and whether less is better; None: not a comparison."""
    ours, _, rival = m.provider.partition(" over ")
    if m.quantity == "speed-up":
        return ("time of reading" if m.bench == "data" else "step time", ours, rival, False)
    if m.quantity.startswith("ratio of the "):
        return (m.quantity.removeprefix("ratio of the "), ours, rival, True)
    if m.bench == "startup" and " / " in m.quantity:
        what, _, rival = m.quantity.partition(" / ")
        return (what, m.provider, rival, True)
    if m.quantity == "over compile":
        return ("time of the op", m.provider, "torch.compile", False)
    return None


def _sides(m: Measurement, what: str, names: Sequence[str], all_: Sequence[Measurement]) -> Iterator[Measurement]:
    """Yield the times of both programs, of the same case where there are such."""
    for name in names:
        found = [other for other in all_ if other.provider == name and other.quantity in (*_TIMES, what)]
        yield from [other for other in found if other.case == m.case] or found


def _unsteady(found: Sequence[Measurement]) -> Iterator[str]:
    for m in found:
        if reason := record_warnings.unsteady(m):
            yield f"{m.provider}, {m.quantity}: {reason}"
            return
