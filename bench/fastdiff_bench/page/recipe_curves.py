"""Picture of training methods: their losses by step, and their speed-ups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fastdiff.evaluation.figures import figure_for
from fastdiff_bench.measure.speed_up import GAIN, Curve, SpeedUp

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Methods: TypeAlias = Mapping[tuple[str, str], tuple[Sequence[Curve], SpeedUp]]
"""Curves, one per seed, and speed-up of each method, by case and name; the first of a case is its baseline."""
# Colour-blind safe palette of Okabe and Ito (2008).
_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_DASHES = ("-", "--", ":")
_HIGHEST = 2.0
"""Largest loss that is shown, over the final one of the baseline."""


def draw(methods: Methods, path: Path) -> None:
    """Write the picture: a row per case, on the left the mean losses by step, on the right the speed-ups.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: with the path; it cannot be written.
    """
    cases = list(dict.fromkeys(case for case, _ in methods))
    with figure_for(path, (11.0, 4.2 * len(cases))) as figure:
        axes = figure.subplots(len(cases), 2, squeeze=False, width_ratios=(3, 2))
        for row, case in zip(axes, cases, strict=True):
            own = {name: found for (of, name), found in methods.items() if of == case}
            _losses(row[0], case, own)
            _speed_ups(row[1], own)


def _losses(axes: Axes, case: str, methods: Mapping[str, tuple[Sequence[Curve], SpeedUp]]) -> None:
    ends = []
    for number, (name, (curves, _)) in enumerate(methods.items()):
        mean = np.mean([curve.losses for curve in curves], axis=0)
        axes.plot(curves[0].steps, mean, label=name, linewidth=1.6, **_style(number))
        ends.append(mean[-1])
    axes.axhline(ends[0], color="#777777", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylim(0.97 * min(ends), _HIGHEST * ends[0])
    axes.set_title(f"{case}: held-out loss, mean of {len(curves)} seeds")
    axes.set_xlabel("optimizer steps")
    axes.legend(fontsize=7.5)


def _speed_ups(axes: Axes, methods: Mapping[str, tuple[Sequence[Curve], SpeedUp]]) -> None:
    for number, (_, found) in enumerate(methods.values()):
        low, high = found.bounds
        colour = _style(number)["color"]
        axes.plot([low, high], [number, number], color=colour, linewidth=1.6)
        axes.plot(found.values, [number] * len(found.values), "|", color=colour, markersize=9)
        axes.plot(found.mean, number, "o", color=colour, markersize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvline(GAIN, color="#777777", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.invert_yaxis()
    axes.set_title("fewer steps to the first one's final loss,\n± 2 standard errors; dashes: each seed", fontsize=9)
    axes.set_xlabel(f"speed-up (broken line: {GAIN:g})")


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number // len(_COLOURS) % len(_DASHES)],
    }
