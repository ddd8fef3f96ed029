"""Charts of one row per name, which the page draws with HTML: text wraps, tracks take the width that is left.

All positions are percentages of the track. The tables of the report and these charts have the same rows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fastdiff_bench.records.number_format import interval, number
from fastdiff_bench.records.record import Measurement

Kind = Literal["ours", "rival", "unclear"]
"""Colour and shape of a point."""

_LOGARITHMIC = 10.0
"""Ratio of values above which an axis is logarithmic."""
_MARGIN = 0.04
_OTHER = "other"
_COLOURED = ("data", "encode", "objective", "forward", "backward", "optimizer", "ema", _OTHER)
"""Phases with a colour of their own; the rest has that of ``other``, and its own name."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The scale of a chart."""

    label: str
    low: float
    high: float
    logarithmic: bool
    reference: float | None
    """Value with a line across all rows."""

    def place(self, value: float) -> float:
        """Return the percentage at which a value lies; those beyond the ends lie at them."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(100 * share, 2)

    @property
    def title(self) -> str:
        """Label that names a logarithmic scale."""
        return f"{self.label} (logarithmic)" if self.logarithmic else self.label

    @property
    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Places and texts of at most six round values."""
        found = _decades(self.low, self.high) if self.logarithmic else _even(self.low, self.high)
        return tuple((self.place(value), f"{value:,g}") for value in found)


@dataclass(frozen=True, slots=True)
class Point:
    """A value with its range."""

    kind: Kind
    at: float
    left: float
    width: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stacked bar."""

    name: str
    colour: str
    """Class of the page's style."""
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class ChartRow:
    """One row: a name, a point or a bar, and the number in words."""

    name: str
    point: Point | None
    segments: tuple[Segment, ...]
    value: str
    range: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class RowChart:
    """A chart with its caption."""

    title: str
    caption: str
    axis: Axis
    groups: tuple[tuple[str, tuple[ChartRow, ...]], ...]
    """Rows by case."""
    legend: tuple[tuple[str, str], ...]
    """Class and meaning of each colour."""


def axis(ends: Iterable[float], label: str, *, reference: float | None = None, from_zero: bool = False) -> Axis:
    """Return an axis with room around the values; one over a wide range of positive values is logarithmic."""
    values = [*ends, *([] if reference is None else [reference])]
    low, high = min(values), max(values)
    if high > _LOGARITHMIC * low > 0 and not from_zero:
        room = (high / low) ** _MARGIN
        return Axis(label, low / room, high * room, True, reference)
    low = min(low, 0.0) if from_zero or (low >= 0 and reference is None) else low
    room = _MARGIN * ((high - low) or 1.0)
    return Axis(label, low if low == 0 else low - room, high + room, False, reference)


def point(on: Axis, value: float, low: float, high: float, kind: Kind) -> Point:
    """Return the point of a value and its range."""
    left = on.place(low)
    return Point(kind, on.place(value), left, round(on.place(high) - left, 2))


def points(
    title: str,
    caption: str,
    groups: Mapping[str, Sequence[tuple[str, Measurement]]],
    label: str,
    ours: Mapping[str, Kind],
    reference: float | None = None,
) -> RowChart:
    """Return a chart of measurements by case and provider, in the given order."""
    every = [m for rows in groups.values() for _, m in rows]
    on = axis((end for m in every for end in m.interval), label, reference=reference)
    made = {
        case: tuple(
            ChartRow(name, point(on, m.value, *m.interval, ours[name]), (), number(m.value), interval(m))
            for name, m in rows
        )
        for case, rows in groups.items()
    }
    legend = (("ours", "fastdiff"), ("rival", "others"))
    present = {row.point.kind for rows in made.values() for row in rows if row.point}
    return RowChart(title, caption, on, tuple(made.items()), tuple(one for one in legend if one[0] in present))


def stacks(title: str, caption: str, found: Mapping[tuple[str, str], Mapping[str, Measurement]]) -> RowChart | None:
    """Return the phases of a step as stacked bars, one per configuration; None without phases.

    Each bar is as long as the step: what its phases leave is drawn as "other".
    """
    bars = {names: parts_of(of_one) for names, of_one in found.items()}
    bars = {names: parts for names, parts in bars.items() if parts}
    if not bars:
        return None
    on = axis((sum(parts.values()) for parts in bars.values()), "ms per step", from_zero=True)
    groups: dict[str, list[ChartRow]] = {}
    for (case, provider), parts in bars.items():
        segments = tuple(
            Segment(name, f"p-{name}" if name in _COLOURED else f"p-{_OTHER}", on.place(ms), number(ms))
            for name, ms in parts.items()
        )
        drawn = sum(segment.width for segment in segments)
        assert abs(drawn - on.place(sum(parts.values()))) < 0.01 * len(parts), f"{provider}: a phase is not drawn"
        groups.setdefault(case, []).append(ChartRow(provider, None, segments, number(sum(parts.values())), ""))
    names = dict.fromkeys(name for parts in bars.values() for name in parts)
    order = sorted(names, key=lambda name: _COLOURED.index(name) if name in _COLOURED else len(_COLOURED))
    legend = tuple((f"p-{name}" if name in _COLOURED else f"p-{_OTHER}", name) for name in order)
    return RowChart(title, caption, on, tuple((case, tuple(rows)) for case, rows in groups.items()), legend)


def parts_of(of_one: Mapping[str, Measurement]) -> dict[str, float]:
    """Return the milliseconds of every phase of a step, with the rest of the step as "other"; empty without phases.

    The phases of a step whose "other" was measured are complete: its step time without marks is shorter.
    """
    parts = {q.removeprefix("phase "): m.value for q, m in of_one.items() if q.startswith("phase ")}
    step, whole = of_one.get("step time"), sum(parts.values())
    if parts and step is not None and _OTHER not in parts and step.value > whole:
        parts[_OTHER] = step.value - whole
    return parts


def _decades(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten, or only these over a wide range."""
    for steps in ((1, 2, 5), (1, 3), (1,)):
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [step * 10.0**exponent for exponent in exponents for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) <= 6:
            return found
    return found[:: math.ceil(len(found) / 6)]


def _even(low: float, high: float) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(step * n, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
