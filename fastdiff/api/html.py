"""HTML of a run for notebooks: metadata, the loss curve, the newest picture. Everything is escaped and inline."""

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from fastdiff.dashboard.pictures import content, pictures_of
from fastdiff.dashboard.tail import Tail
from fastdiff.json_lines import Record

_WIDTH, _HEIGHT = 360, 120
_POINTS = 400
"""Largest number of points of a curve."""
_LARGEST_PICTURE, _WIDEST_PICTURE = 4 << 20, 1024
"""Bytes of the largest picture that is shown, and pixels to which a wider one is made smaller."""
_LARGEST_NUMBER = 1e300
_FRAME = "display:flex;gap:24px;align-items:flex-start;flex-wrap:wrap;font-family:sans-serif;font-size:13px"


class Losses:
    """The positive losses of a run by step."""

    def __init__(self, run: Path) -> None:
        self._points: list[tuple[float, float]] = []
        self.newest: Record = {}
        """The newest record that was read."""
        self._tail = Tail(run / "metrics.jsonl", self)

    def clear(self) -> None:
        """Forget all records."""
        self._points.clear()
        self.newest = {}

    def add(self, record: Record) -> None:
        """Take the next record."""
        loss, step = record.get("loss"), record["step"]
        if isinstance(loss, int | float) and 0 < loss < _LARGEST_NUMBER and abs(step) < _LARGEST_NUMBER:
            self._points.append((float(step), float(loss)))
            self.newest = record

    def read(self) -> Sequence[tuple[float, float]]:
        """Read what the log has gained; return all steps and their losses."""
        self._tail.read()
        return self._points


def card(title: str, metadata: Mapping[str, object], run: Path) -> str:
    """Return a table of metadata, the curve of the loss and the newest picture of a run."""
    rows = "".join(
        f"<tr><td style='text-align:left;opacity:.65'>{escape(name)}</td>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in metadata.items()
    )
    table = f"<div><b>{escape(title)}</b><table>{rows}</table></div>"
    return f"<div style='{_FRAME}'>{table}{_curve(Losses(run).read())}{_newest_picture(run)}</div>"


def live(run: Path, losses: Losses, steps: int) -> str:
    """Return the view of a run that is training.

    Args:
        run: its folder.
        losses: of the run, kept from one view to the next.
        steps: of the whole run.
    """
    points = losses.read()
    newest = losses.newest
    percent = int(100 * min(newest.get("step", 0) / max(steps, 1), 1))
    rate = newest.get("samples_per_s")
    text = f"{rate:,.0f} images/s" if isinstance(rate, int | float) and 0 < rate < _LARGEST_NUMBER else ""
    name = run.name if newest else f"{run.name}, starting"
    bar = (
        "<div style='width:360px;height:10px;border:1px solid currentColor;border-radius:5px;overflow:hidden;"
        f"opacity:.8'><div style='width:{percent}%;height:100%;background:#2a78b8'></div></div>"
    )
    head = f"<div><b>{escape(name)}</b> {percent} % of {steps:,} steps<br>{bar}<code>{escape(text)}</code></div>"
    return f"<div style='{_FRAME}'>{head}{_curve(points)}{_newest_picture(run)}</div>"


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Draw positive losses over steps, with a logarithmic axis."""
    if len(points) < 2:
        return ""
    thinned = [*points[:: max(1, len(points) // _POINTS)], points[-1]]
    logs = [math.log(loss) for _, loss in thinned]
    low, high, last = min(logs), max(logs), thinned[-1][0]
    first = thinned[0][0]

    def place(step: float, log: float) -> str:
        x = (step - first) / max(last - first, 1e-12) * _WIDTH
        y = (high - log) / max(high - low, 1e-12) * _HEIGHT
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, log) for (step, _), log in zip(thinned, logs, strict=True))
    return (
        f"<div><svg width='{_WIDTH}' height='{_HEIGHT}' style='overflow:visible'>"
        f"<polyline points='{line}' fill='none' stroke='#2a78b8' stroke-width='1.5'/></svg>"
        f"<div style='opacity:.65'>loss {math.exp(high):.3g} to {math.exp(low):.3g} (logarithmic), step {first:,.0f} "
        f"to {last:,.0f}, now {thinned[-1][1]:.4f}</div></div>"
    )


def _newest_picture(run: Path) -> str:
    found, _ = pictures_of(run)
    if not found:
        return ""
    newest = found[-1]
    try:
        data, kind = content(newest, _WIDEST_PICTURE if newest.can_shrink else None)
        if len(data) > _LARGEST_PICTURE:
            raise ValueError(f"of {len(data) / 2**20:.1f} MiB")
    except (OSError, ValueError) as error:
        return f"<div style='opacity:.65'>picture of step {newest.step:,} is not shown: {escape(str(error))}</div>"
    return (
        f"<div><img src='data:{kind};base64,{base64.b64encode(data).decode()}' "
        "style='max-width:360px;image-rendering:pixelated'>"
        f"<div style='opacity:.65'>step {newest.step:,}</div></div>"
    )
