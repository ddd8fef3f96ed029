"""What ``fastdiff.train`` shows while a run lasts: the output of the ranks, and in a notebook a live view."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from fastdiff.api.html import Losses, live

_BAR = re.compile(r"^(?P<name>[^\n]{0,200}?): +(?P<percent>\d+)%\|.*\| (?P<rest>.*)$")
"""A progress bar of tqdm, as a rank writes it into a pipe."""
_EVERY_S = 1.0
"""Time between two drawings of the view of a notebook."""


class Display(Protocol):
    """A place for the output of a run."""

    def write(self, text: str) -> None:
        """Take a piece of the output, which may end within a line."""

    def close(self) -> None:
        """Show the end."""


def open_display(run: Path, steps: int) -> Display:
    """Return the display of this process: of a notebook, or standard error."""
    return Notebook(run, steps) if in_notebook() else Stream()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    interactive = sys.modules.get("IPython")
    shell = None if interactive is None else interactive.get_ipython()
    return shell is not None and any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)


class Stream:
    """Standard error, as it comes: bars redraw themselves."""

    def write(self, text: str) -> None:
        """Pass it on."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def close(self) -> None:
        """Do nothing."""


class Notebook:
    """A view of the run that is drawn again and again, with the lines of the output below it.

    Args:
        run: its folder.
        steps: of the whole run.
    """

    def __init__(self, run: Path, steps: int) -> None:
        from IPython.display import HTML, display

        self._html: Any = HTML
        self._run, self._losses, self._steps = run, Losses(run), steps
        self._rest, self._percent, self._name, self._text = "", 0, "starting", ""
        self._drawn_s = 0.0
        self._view: Any = display(HTML(""), display_id=True)
        self._draw()

    def write(self, text: str) -> None:
        """Take the bars for the view, and print the lines."""
        *lines, self._rest = re.split(r"[\r\n]", self._rest + text)
        for line in lines:
            self._take(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).strip())
        if time.monotonic() - self._drawn_s > _EVERY_S:
            self._draw()

    def close(self) -> None:
        """Draw the last state."""
        self._draw()

    def _take(self, line: str) -> None:
        bar = _BAR.match(line)
        if bar is not None:
            self._name, self._percent, self._text = bar["name"], int(bar["percent"]), bar["rest"]
        elif line:
            print(line, flush=True)  # noqa: T201

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        with contextlib.suppress(OSError):  # the folder does not answer; the training goes on
            self._view.update(self._html(self._drawn()))

    def _drawn(self) -> str:
        return live(self._run, self._losses, self._name, self._percent, self._text, self._steps)
