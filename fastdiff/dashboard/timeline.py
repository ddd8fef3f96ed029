"""The time of a run for the page: sums by class, starts, and what each stretch of the clock went into."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdiff.ledger.reader import CLASSES, Span, Sums
from fastdiff.ledger.report import as_json, costs

_MOST = 400
"""Stretches of a timeline: more than a screen can show apart."""
_HALF = 0.5


def time_of(run: Path, sums: Sums) -> dict[str, Any]:
    """Return the whole account of a run, as ``fastdiff ledger --json`` prints it, and its timeline."""
    return as_json(run, sums, costs(sums, None, None)) | {"classes": CLASSES, "timeline": timeline(sums)}


def timeline(sums: Sums) -> list[dict[str, Any]]:
    """Return stretches of time with seconds by class, and the samples per second of those that have steps.

    Neighbours are merged up to a ``_MOST``-th of the whole time; a gap of one class that is as long stays alone.
    """
    least = sums.wall_s / _MOST
    merged: list[Span] = []
    for span in sums.spans:
        long = span.ended - span.began >= least
        last = merged[-1] if merged else None
        fits = last is not None and last.start == span.start and not long and last.ended - last.began < least * _HALF
        if last is None or not fits:
            merged.append(Span(span.start, span.began, span.ended, span.step, dict(span.seconds)))
            continue
        last.ended, last.step = span.ended, span.step
        for name, seconds in span.seconds.items():
            last.seconds[name] = last.seconds.get(name, 0.0) + seconds
    return _as_json(sums, merged)


def _as_json(sums: Sums, spans: Sequence[Span]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    before = 0
    for span in spans:
        start = sums.starts[span.start]
        spent_s = sum(span.seconds.get(name, 0.0) for name in ("step kept", "step lost", "data wait"))
        if not found or found[-1]["start"] != span.start:
            before = start.resumed
        has_steps = any(span.seconds.get(name) for name in ("step kept", "step lost"))
        reached = span.step if has_steps else before  # until it is resumed, a start has the step of the one before
        steps = max(0, reached - before)
        found.append(
            {
                "start": span.start,
                "began": round(span.began, 3),
                "ended": round(span.ended, 3),
                "step": reached,
                "seconds": {name: round(seconds, 3) for name, seconds in span.seconds.items() if seconds > 0},
                "samples_per_s": round(steps * start.samples / spent_s, 3) if steps and spent_s else None,
            }
        )
        before = max(before, reached)
    return found
