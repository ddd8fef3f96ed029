"""Chart primitives of the report: rows of points or bars, curves, and their SVG.

The colours (Okabe and Ito, 2008) are distinguishable with any colour vision, and colour is never the only difference:
points have shapes, bars have labels.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

from bench import BenchError
from bench.records.number_format import label, number
from bench.records.record import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#999999", "#000000",
)  # fmt: skip

Groups: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Measurement]]]
"""Measurements by case, row and series."""

Curves: TypeAlias = Mapping[str, Mapping[int, Mapping[str, Measurement]]]
"""Measurements by series, position on the x axis and quantity."""

_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
_SHAPES = "os^DvPX*<>p"
"""Their numbers are coprime, so no two series look alike."""
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "fastdiff", "font.size": 9, "font.family": ["DejaVu Sans", "sans-serif"],
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#dddddd",
    "grid.linewidth": 0.6, "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip
_WIDTH = 9.0
_ROW = 0.24
"""Height of a row in inches."""
_CHARACTERS = 118
"""Characters that fit into the width."""
_LOGARITHMIC = 10.0
"""Ratio of values above which the axis is logarithmic."""
_MANY_DECADES = 1e3
_ID = re.compile(r'(\bid="|url\(#|href="#)')


def style() -> AbstractContextManager[None]:
    """Return the matplotlib style context in which figures are drawn and written.

    Raises:
        BenchError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise BenchError("the plots of a report need matplotlib; pip install 'fastdiff[bench]'") from None
    return matplotlib.rc_context(_STYLE)


def canvas(height: float, columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """Return an empty figure, ``height`` in inches, with axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def svg(figure: Figure, caption_id: str) -> str:
    """Return the figure as an SVG element, described by the element ``caption_id``, which prefixes its ids."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = _ID.sub(rf"\g<1>{caption_id}-", text)
    return text.replace("<svg", f'<svg role="img" aria-labelledby="{caption_id}"', 1)


def look(place: int) -> tuple[str, str]:
    """Return colour and shape of the points of a series."""
    return _COLOURS[place % len(_COLOURS)], _SHAPES[place % len(_SHAPES)]


def mark(axes: Axes, x: float, measurement: Measurement, place: int, *, across: bool = False) -> None:
    """Draw a point of the series ``place`` with its range from p20 to p80.

    Args:
        axes: to draw on.
        x: the other coordinate.
        measurement: its value.
        place: index of the series.
        across: the value is along the x axis, and ``x`` is y.
    """
    low, high = measurement.interval
    ends = [[max(measurement.value - low, 0.0)], [max(high - measurement.value, 0.0)]]
    colour, shape = look(place)
    kwargs: dict[str, Any] = {"fmt": shape, "color": colour, "markersize": 5.5, "capsize": 2.5, "elinewidth": 1.3}
    if across:
        axes.errorbar(measurement.value, x, xerr=ends, **kwargs)
    else:
        axes.errorbar(x, measurement.value, yerr=ends, **kwargs)


def legend(figure: Figure, names: Iterable[str], colours: Mapping[str, str] | None = None) -> None:
    """Draw the series names above the figure, with their points, or with patches of ``colours`` if given."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for place, name in enumerate(names):
        if colours:
            handles.append(Patch(color=colours[name], label=name))
        else:
            colour, shape = look(place)
            handles.append(Line2D([], [], color=colour, marker=shape, markersize=5.5, linestyle="", label=name))
    columns = max(1, min(len(handles), _CHARACTERS // (6 + max(len(handle.get_label()) for handle in handles))))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, handletextpad=0.4, columnspacing=1.4)


def grouped(found: Mapping[tuple[str, str], Mapping[str, Measurement]]) -> Groups:
    """Group measurements by case, then by provider."""
    groups: dict[str, dict[str, Mapping[str, Measurement]]] = {}
    for (case, provider), of_one in found.items():
        groups.setdefault(case, {})[provider] = of_one
    return groups


def placed(groups: Groups) -> Iterator[tuple[int, str, Mapping[str, Measurement]]]:
    """Yield the rows with their positions from the top; the case name takes the position above its group."""
    place = 0
    for rows in groups.values():
        for name, points in rows.items():
            place += 1
            yield place, name, points
        place += 1


def rows(groups: Groups) -> tuple[Figure, Axes]:
    """Return empty axes with a line per row, and the case above each group."""
    lines = list(placed(groups))
    last = lines[-1][0]
    figure, (axes,) = canvas(0.9 + _ROW * (last + 1))
    axes.set_yticks([place for place, _, _ in lines], [name for _, name, _ in lines])
    axes.set_ylim(last + 0.6, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    top = 0
    for case, group in groups.items():
        axes.text(
            0.005, top, case, transform=axes.get_yaxis_transform(), fontweight="bold", va="center", fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
        top += len(group) + 1
    return figure, axes


def dots(groups: Groups, xlabel: str, *, reference: float | None = None, from_zero: bool = True) -> tuple[Figure, Axes]:
    """Draw a line per row with a point and its range per series; the axis is logarithmic for a wide range.

    Args:
        groups: the values.
        xlabel: quantity and unit.
        reference: value at which a line is drawn across all rows.
        from_zero: start the axis at zero, unless it is logarithmic.
    """
    figure, axes = rows(groups)
    lines = list(placed(groups))
    series = list(dict.fromkeys(name for _, _, points in lines for name in points))
    for place, _, points in lines:
        for name, m in points.items():
            mark(axes, place, m, series.index(name), across=True)
            if len(series) == 1:
                at, text = (m.interval[1], place), number(m.value)
                axes.annotate(text, at, (7, 0), textcoords="offset points", va="center", fontsize=8)
    ends = [end for _, _, points in lines for m in points.values() for end in m.interval]
    if reference is not None:
        axes.axvline(reference, color="black", linewidth=1, linestyle="--", zorder=1)
        ends.append(reference)
    if max(ends) > _LOGARITHMIC * min(ends) > 0:
        axes.set_xscale("log")
        axes.set_xlim(min(ends) / 1.15, max(ends) * 1.3)
        plain(axes.xaxis)
    else:
        room = 0.1 * (max(ends) - (0 if from_zero else min(ends)))
        axes.set_xlim(0 if from_zero else min(ends) - room, max(ends) + room)
    axes.set_xlabel(xlabel)
    if len(series) > 1:
        legend(figure, series)
    return figure, axes


def curves(axes: Axes, series: Curves, quantity: str) -> None:
    """Plot a quantity against powers of two, one curve per series."""
    ticks = sorted({x for points in series.values() for x in points})
    for place, points in enumerate(series.values()):
        there = {x: of_one[quantity] for x, of_one in sorted(points.items()) if quantity in of_one}
        axes.plot(list(there), [m.value for m in there.values()], color=look(place)[0], linewidth=1.2)
        for x, m in there.items():
            mark(axes, x, m, place)
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
