"""Pictures of muP: changes of the activations by width, and held-out losses by learning rate and width."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from fastdiff.evaluation.figures import figure_for
from fastdiff_bench.measure.coordinates import Changes, slopes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colour-blind safe palette of Okabe and Ito (2008).
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
_ROOM = 30.0
"""Between the lowest line and the end of the axis, where the legend stands."""


def draw_changes(found: Mapping[str, Mapping[int, Changes]], path: Path) -> None:
    """Write the picture of a coordinate check: a plot per method, a line per part of the network.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: with the path; it cannot be written.
    """
    with figure_for(path, (10.0, 5.0)) as figure:
        plots = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for axes, (method, changes) in zip(plots, found.items(), strict=True):
            widths, exponents = sorted(changes), slopes(changes)
            lines = {
                f"{part}: {exponent:+.2f}": {width: changes[width][part][-1] for width in widths}
                for part, exponent in exponents.items()
            }
            steps = len(next(iter(changes[widths[0]].values())))
            _plot(axes, lines, f"{method}: change of the output after {steps} steps", "width")
            axes.set_yscale("log")
            axes.legend(title="exponent of the width", fontsize=8, title_fontsize=8, ncols=2, loc="lower center")
        lowest = min(last for changes in found.values() for parts in changes.values() for *_, last in parts.values())
        plots[0].set_ylim(bottom=lowest / _ROOM)


def draw_sweeps(found: Mapping[str, Mapping[int, Mapping[float, float]]], path: Path) -> None:
    """Write the picture of a sweep: a plot per method, a line per width, held-out losses over learning rates.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: with the path; it cannot be written.
    """
    with figure_for(path, (10.0, 4.2)) as figure:
        plots = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for axes, (method, widths) in zip(plots, found.items(), strict=True):
            lines = {
                f"width {width}": {rate: loss for rate, loss in sorted(losses.items()) if math.isfinite(loss)}
                for width, losses in sorted(widths.items())
            }
            _plot(axes, lines, f"{method}: held-out loss", "learning rate")
            axes.legend(fontsize=8)


def _plot(
    axes: Axes, lines: Mapping[str, Mapping[int, float] | Mapping[float, float]], title: str, across: str
) -> None:
    """Draw each line by its name, over powers of 2."""
    for colour, (name, line) in zip(cycle(_COLOURS), lines.items(), strict=False):
        axes.plot(list(line), list(line.values()), "o-", color=colour, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(across)
    axes.set_title(title)
