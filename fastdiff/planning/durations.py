"""Durations in words."""

from __future__ import annotations

_DAY, _HOUR, _MINUTE = 86_400.0, 3_600.0, 60.0


def in_words(seconds: float) -> str:
    """Return a duration in the largest unit that it has at least two of, with two digits or more: ``12 min``."""
    for unit, length in (("days", _DAY), ("h", _HOUR), ("min", _MINUTE)):
        if seconds >= 2 * length:
            return f"{_rounded(seconds / length)} {unit}"
    return f"{_rounded(seconds)} s"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.2g}" if value < 9.95 else f"{value:.3g}"
