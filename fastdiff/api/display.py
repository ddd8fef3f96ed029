"""What ``fastdiff.train`` shows while a run lasts: the output of the ranks, on a terminal a bar, in a notebook a view.

The ranks write into a pipe, so they draw no bar: step and loss come from the log of the run.
"""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from fastdiff.api.html import Losses, live
from fastdiff.config.run import RunConfig
from fastdiff.console import write_line
from fastdiff.progress_bar import Bar, is_plain_line
from fastdiff.terminal import redraws

_EVERY_S = 1.0
"""Time between two drawings of the view of a notebook."""


class Display(Protocol):
    """A place for the output of a run."""

    def write(self, text: str) -> None:
        """Take a piece of the output, which may end within a line; an empty one now and then, while there is none."""

    def close(self) -> None:
        """Show the end."""


def open_display(config: RunConfig) -> Display:
    """Return the display of this process: of a notebook, of a terminal, or standard error."""
    if in_notebook():
        return Notebook(Path(config.output.folder), config.steps)
    return Terminal(config) if redraws(sys.stderr) else Stream()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    interactive = sys.modules.get("IPython")
    shell = None if interactive is None else interactive.get_ipython()
    return shell is not None and any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)


class Stream:
    """Standard error, as the output comes."""

    def write(self, text: str) -> None:
        """Pass it on."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def close(self) -> None:
        """Do nothing."""


class Terminal:
    """A bar below the lines of the output."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._losses, self._rest = Losses(Path(config.output.folder)), ""
        self._losses.read()
        self._first = self._losses.newest
        self._bar: Bar | None = None

    def write(self, text: str) -> None:
        """Write the lines, and move the bar on."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if not is_plain_line(line):
                write_line(line)
        self._losses.read()
        newest = self._losses.newest
        if newest and newest is not self._first:
            self._move(int(newest["step"]), float(newest["loss"]))

    def close(self) -> None:
        """Leave the last state of the bar."""
        if self._rest:
            write_line(self._rest)
        if self._bar is not None:
            self._bar.close()

    def _move(self, step: int, loss: float) -> None:
        config = self._config
        if self._bar is None:
            name, rate = Path(config.output.folder).name, (config.batch.samples, "images")
            self._bar = Bar(name, config.steps, "steps", done=step, rate=rate, keeps=True)
        self._bar.figures = [f"loss {loss:.4f}"]
        self._bar.update(step - self._bar.done)


class Notebook:
    """A view of the run that is drawn again and again, with the lines of the output below it.

    Args:
        run: its folder.
        steps: of the whole run.
    """

    def __init__(self, run: Path, steps: int) -> None:
        from IPython.display import HTML, display

        self._html: Any = HTML
        self._run, self._steps = run, steps
        self._losses, self._rest = Losses(self._run), ""
        self._drawn_s = 0.0
        self._view: Any = display(HTML(""), display_id=True)
        self._draw()

    def write(self, text: str) -> None:
        """Print the lines, and draw the view when it is old."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line and not is_plain_line(line):
                print(line, flush=True)  # noqa: T201
        if time.monotonic() - self._drawn_s > _EVERY_S:
            self._draw()

    def close(self) -> None:
        """Draw the last state."""
        self._draw()

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        with contextlib.suppress(OSError):  # the folder does not answer; the training goes on
            self._view.update(self._html(live(self._run, self._losses, self._steps)))
