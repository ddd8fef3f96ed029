"""The picture of a likelihood: what each timestep adds to the bound, and the errors behind it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastdiff.errors import ConfigError
from fastdiff.nll import Likelihood

_STYLE = {
    "font.size": 10, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7, "figure.constrained_layout.use": True,
}  # fmt: skip
_COLOURS = "#0072B2", "#D55E00", "#009E73"


def require_matplotlib() -> None:
    """Refuse before anything is measured what could not be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--png needs matplotlib; pip install 'fastdiff[bench]', or leave it out") from None


def draw(path: Path, found: Likelihood) -> None:
    """Write the picture as a PNG: bound, error of x0 and error of the noise by timestep, both axes logarithmic.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    curves = {
        f"variational bound, bits per dimension: {found.vb.sum():.3f} in all": found.vb,
        "squared error of x0": found.xstart_mse,
        "squared error of the noise": found.mse,
    }
    time = np.arange(1, len(found.vb) + 1)  # from 1, for the logarithm
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.0, 7.5))
        for axes, colour, (title, curve) in zip(
            figure.subplots(len(curves), 1, sharex=True), _COLOURS, curves.items(), strict=True
        ):
            axes.plot(time, curve, color=colour, linewidth=1.5)
            axes.set(title=title, xscale="log", yscale="log")
        axes.set_xlabel("timestep t + 1:  less noise  ←   →  more noise")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
