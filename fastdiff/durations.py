"""Durations in words."""

from itertools import pairwise

_UNITS = (("s", 1.0), ("min", 60.0), ("h", 3_600.0), ("days", 86_400.0))


def in_words(seconds: float) -> str:
    """Return a duration in the largest unit that it has, rounded, at least two of: ``12.6 min``, ``2 h``."""
    for (unit, length), (_, larger) in pairwise(_UNITS):
        shown = _rounded(seconds / length)
        if float(shown.replace(",", "")) * length < 2 * larger:
            return f"{shown} {unit}"
    unit, length = _UNITS[-1]
    return f"{_rounded(seconds / length)} {unit}"


def _rounded(value: float) -> str:
    """Return a number with two digits below 10, with three or all before the point from there on."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}" if value < 10 else f"{value:.3g}"
