"""Chart primitives of the report for two axes: points with ranges, curves, and their SVG in two widths.

The colours (Okabe and Ito, 2008) are distinguishable with any colour vision, and colour is never the only difference:
points have shapes. The page's style decides on their tone, so that the same SVG is legible on white and on black.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fastdiff.optional_packages import pip_install
from fastdiff_bench import BenchError
from fastdiff_bench.records.comparisons import is_ours
from fastdiff_bench.records.number_format import label
from fastdiff_bench.records.record import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#999999", "#000000",
)  # fmt: skip

Curves: TypeAlias = Mapping[str, Mapping[int, Mapping[str, Measurement]]]
"""Measurements by series, position on the x axis and quantity."""

Look: TypeAlias = tuple[str, str]
"""Colour and shape of the points of a series."""

_OURS, _RIVALS = (BLUE, SKY, GREEN, BLACK), (VERMILION, ORANGE, PURPLE, GREY)
_TONES = {
    BLUE: "var(--blue)", SKY: "var(--sky)", GREEN: "var(--green)", BLACK: "currentColor", VERMILION: "var(--vermilion)",
    ORANGE: "var(--orange)", PURPLE: "var(--purple)", GREY: "var(--grey)", "#dddddd": "var(--rule)",
}  # fmt: skip
"""Colours of the drawings and those of the page's style."""
_SHAPES = "os^DvPX*<>p"
"""Their numbers are coprime, so no two series look alike."""
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "fastdiff", "font.size": 9, "font.family": ["DejaVu Sans", "sans-serif"],
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#dddddd",
    "grid.linewidth": 0.6, "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip
_MANY_DECADES = 1e3
_ID = re.compile(r'(\bid="|url\(#|href="#)')


@dataclass(frozen=True, slots=True)
class Layout:
    """Width of a figure; letters have the same size in all."""

    name: str
    inches: float
    characters: int
    """Characters that fit into the width."""
    beside: bool
    """Whether panels stand side by side, or one above the other."""


WIDE, NARROW = Layout("wide", 9.0, 118, True), Layout("narrow", 3.7, 46, False)


def style() -> AbstractContextManager[None]:
    """Return the matplotlib style context in which figures are drawn and written.

    Raises:
        BenchError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise BenchError(f"the plots of a report need matplotlib; {pip_install('matplotlib')}") from None
    return matplotlib.rc_context(_STYLE)


def canvas(layout: Layout, height: float, panels: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Return an empty figure with axes of ``height`` inches, side by side or stacked."""
    from matplotlib.figure import Figure

    rows, columns = (1, panels) if layout.beside else (panels, 1)
    figure = Figure(figsize=(layout.inches, height * rows))
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def svg(figure: Figure, caption_id: str, layout: Layout) -> str:
    """Return the figure as an SVG element, described by the element ``caption_id``, which prefixes its ids."""
    file = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = _ID.sub(rf"\g<1>{caption_id}-{layout.name}-", text)
    for colour, tone in _TONES.items():
        text = text.replace(colour.lower(), tone)
    return text.replace("<svg", f'<svg class="{layout.name}" role="img" aria-labelledby="{caption_id}"', 1)


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return colour and shape by series: blue and green tones are fastdiff's, warm ones and grey those of others."""
    found: dict[str, Look] = {}
    names = list(names)
    without_ours = not any(map(is_ours, names))
    for place, name in enumerate(names):
        palette = (*_OURS, *_RIVALS) if without_ours else _OURS if is_ours(name) else _RIVALS
        used = sum(look[0] in palette for look in found.values())
        found[name] = palette[used % len(palette)], _SHAPES[place % len(_SHAPES)]
    return found


def mark(axes: Axes, x: float, measurement: Measurement, look: Look) -> None:
    """Draw a measurement as a point with its range from p20 to p80."""
    low, high = measurement.interval
    ends = [[max(measurement.value - low, 0.0)], [max(high - measurement.value, 0.0)]]
    colour, shape = look
    kwargs: dict[str, Any] = {"fmt": shape, "color": colour, "markersize": 5.5, "capsize": 2.5, "elinewidth": 1.3}
    axes.errorbar(x, measurement.value, yerr=ends, **kwargs)


def legend(figure: Figure, layout: Layout, found: Mapping[str, Look]) -> None:
    """Draw the series names above the figure, with their points."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=shape, markersize=5.5, linestyle="", label=name)
        for name, (colour, shape) in found.items()
    ]
    columns = max(1, min(len(handles), layout.characters // (6 + max(map(len, found)))))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, handletextpad=0.4, columnspacing=1.4)


def curves(axes: Axes, series: Curves, quantity: str, found: Mapping[str, Look]) -> None:
    """Plot a quantity against powers of two, one curve per series."""
    ticks = sorted({x for points in series.values() for x in points})
    for name, points in series.items():
        there = {x: of_one[quantity] for x, of_one in sorted(points.items()) if quantity in of_one}
        axes.plot(list(there), [m.value for m in there.values()], color=found[name][0], linewidth=1.2)
        for x, m in there.items():
            mark(axes, x, m, found[name])
            axes.set_ylabel(label(quantity, m.unit))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)


def plain(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers: 0.5, 1, 2, 5, ..., or only decades over a wide range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high < _MANY_DECADES * low else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())
