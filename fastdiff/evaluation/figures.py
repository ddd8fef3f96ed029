"""Figures of curves: their style, and how they are written."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fastdiff.errors import ConfigError
from fastdiff.optional_packages import pip_install
from fastdiff.outputs import write_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = {
    "font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7, "legend.frameon": False, "figure.constrained_layout.use": True,
}  # fmt: skip


def require_matplotlib() -> None:
    """Check for matplotlib before anything is measured; ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(f"--png needs matplotlib; {pip_install('matplotlib')}, or leave it out") from None


@contextmanager
def figure_for(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield an empty figure, which is written at the end (``outputs.write_output``).

    Args:
        path: picture to write; its suffix chooses the format.
        size: width and height in inches.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: with the path; it cannot be written, and an earlier file stays.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    content = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size)
        yield figure
        figure.savefig(content, format=path.suffix[1:].lower(), dpi=150)
    write_output(path, content.getvalue())
