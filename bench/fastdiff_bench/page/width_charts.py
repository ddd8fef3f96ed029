"""Pictures of muP: changes of the activations by width, and held-out losses by learning rate and width."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from fastdiff.evaluation.figures import figure_for
from fastdiff_bench.measure.coordinates import Changes, slopes

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
            for colour, part in zip(_COLOURS, exponents, strict=False):
                last = [changes[width][part][-1] for width in widths]
                axes.plot(widths, last, "o-", color=colour, markersize=4, label=f"{part}: {exponents[part]:+.2f}")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("width")
            steps = len(next(iter(changes[widths[0]].values())))
            axes.set_title(f"{method}: change of the output after {steps} steps")
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
            for colour, (width, losses) in zip(_COLOURS, sorted(widths.items()), strict=False):
                finite = {rate: loss for rate, loss in sorted(losses.items()) if math.isfinite(loss)}
                axes.plot(list(finite), list(finite.values()), "o-", color=colour, markersize=4, label=f"width {width}")
            axes.set_xscale("log", base=2)
            axes.set_xlabel("learning rate")
            axes.set_title(f"{method}: held-out loss")
            axes.legend(fontsize=8)
