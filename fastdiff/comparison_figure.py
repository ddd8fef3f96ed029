"""The picture of a comparison: both losses over the log SNR, and their difference below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastdiff.comparison import SIGNIFICANT, Comparison, Row
from fastdiff.errors import ConfigError
from fastdiff.noise_bins import SNR_CENTRES, SNR_EDGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of Okabe and Ito (2008), which people with any colour vision tell apart; shapes differ too.
_A, _B, _SAME, _SMALL = "#0072B2", "#D55E00", "#999999", "#555555"
_STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7, "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip
_LOGARITHMIC = 10.0
"""Losses further apart than this are drawn on a logarithmic axis."""
_FAR = 2.0
"""Relative differences beyond which their axis is logarithmic, but for its middle."""
_SHIFT = 0.08
"""By which the points of A and B stand beside the middle of their bin, so that their errors do not hide each other."""


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture as a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"matplotlib, which draws {path}, is not installed: pip install 'fastdiff[bench]'") from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9.0, 6.2))
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _losses(top, comparison)
        _differences(bottom, comparison)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _losses(axes: Axes, comparison: Comparison) -> None:
    names = _names(comparison)
    for shift, colour, shape, of in ((-_SHIFT, _A, "o", "a"), (_SHIFT, _B, "s", "b")):
        known = [(x, getattr(row, of)) for x, row in zip(SNR_CENTRES, comparison.bins, strict=True)]
        known = [(x, mean) for x, mean in known if mean.count]
        axes.errorbar(
            [x + shift for x, _ in known],
            [mean.mean for _, mean in known],
            [0.0 if math.isnan(mean.error) else SIGNIFICANT * mean.error for _, mean in known],
            color=colour, marker=shape, markersize=5, linewidth=1.5, elinewidth=1.2, capsize=2.5, label=names[of],
        )  # fmt: skip
    means = [mean.mean for row in comparison.bins for mean in (row.a, row.b) if mean.count]
    if means and min(means) > 0 and max(means) > _LOGARITHMIC * min(means):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(comparison.unit.split(", as ")[0])
    axes.set_title(_verdict(comparison.total, names))
    axes.legend(loc="best")


def _differences(axes: Axes, comparison: Comparison) -> None:
    """In percent of A: the losses of the bins may be decades apart."""
    for x, row in zip(SNR_CENTRES, comparison.bins, strict=True):
        if math.isnan(row.relative):
            continue
        error = 0.0 if math.isnan(row.error) else 100 * SIGNIFICANT * row.error / row.a.mean
        colour = _SAME if not row.significant else _B if row.difference > 0 else _A
        axes.errorbar(
            x, 100 * row.relative, error, color=colour, marker="D", markersize=5, elinewidth=1.6, capsize=3,
            markerfacecolor=colour if row.significant else "white",
        )  # fmt: skip
        axes.annotate(
            f"{row.a.count}", (x, 0.02), xycoords=("data", "axes fraction"), color=_SMALL, fontsize=7.5, ha="center"
        )
    axes.axhline(0, color="black", linewidth=1)
    axes.margins(y=0.18)  # for the numbers of samples
    if any(abs(row.relative) > _FAR for row in comparison.bins):
        axes.set_yscale("symlog", linthresh=10)
    axes.set_ylabel("B − A, % of A")
    kind = "paired differences" if comparison.paired else "differences (other noise levels: not paired)"
    marks = f"±{SIGNIFICANT:g} standard errors; filled: marked in the table"
    axes.set_title(f"{kind} with {marks}; below: samples", fontsize=9, color=_SMALL)
    axes.set_xticks(SNR_EDGES[1::2])
    axes.set_xlim(SNR_CENTRES[0] - 1, SNR_CENTRES[-1] + 1)
    axes.set_xlabel("more noise  ←   log SNR   →  less noise")


def _names(comparison: Comparison) -> dict[str, str]:
    folders: Sequence[Path] = [found.folder.resolve() for found in (comparison.a, comparison.b)]
    same = folders[0].name == folders[1].name
    return {of: f"{of.upper()}: {folder if same else folder.name}" for of, folder in zip("ab", folders, strict=True)}


def _verdict(total: Row, names: dict[str, str]) -> str:
    """The total in one sentence."""
    if math.isnan(total.relative):
        return f"{names['b']} against {names['a']}"
    verdict = ("B is higher" if total.difference > 0 else "B is lower") if total.significant else "no clear difference"
    middle, reach = 100 * total.relative, 100 * SIGNIFICANT * total.error / total.a.mean
    signed = f"{middle:+.2f}".replace("-", "−")
    return f"{verdict}: B − A is {signed} ± {reach:.2f} % of A ({total.name})"
