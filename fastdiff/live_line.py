"""The last line of the terminal, drawn over as work goes on; messages are written above it.

Nothing here starts a thread or hides the cursor: a process that is killed leaves a usable terminal.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastdiff import verbosity
from fastdiff.terminal import columns, fitted, redraws, width

_ERASE = "\r\x1b[K"
_REST = "..."
"""Stands for what a line has no room for."""


class LiveLine:
    """The line of this process on standard error; nothing is drawn unless that is a terminal, or with ``--quiet``."""

    def __init__(self) -> None:
        self.shares = os.environ.get("RANK", "0") != "0"
        """Whether another process may show a line on the same terminal: messages erase it, and it draws it again."""
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def draw(self, text: str) -> bool:
        """Show a text in place of what stands there; return whether there is a terminal for it.

        A text without escape sequences is cut at the width of the terminal.
        """
        with self._lock:
            if verbosity.is_quiet() or not redraws(sys.stderr):
                return False
            self._shown = _cut(text)
            self._write(_ERASE + self._shown)
            return True

    def clear(self) -> None:
        """Take the text away."""
        with self._lock:
            self._write(_ERASE * bool(self._shown))
            self._shown = ""

    def keep(self) -> None:
        """Leave the text where it is; all that follows stands below it."""
        with self._lock:
            self._write("\n" * bool(self._shown))
            self._shown = ""

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Show a text while something lasts that has no bar; bars within take its place."""
        if not self.shares:
            self.draw(text)
        try:
            yield
        finally:
            self.clear()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the line away while something else is printed on the terminal."""
        with self._lock:
            self._write(_ERASE * bool(self._shown))
            yield
            self._write(self._shown)

    def write_above(self, text: str) -> None:
        """Write a message, wrapped at the width of a terminal, and draw the line again below it."""
        with self._lock:
            erase = _ERASE if self._shown or (self.shares and redraws(sys.stderr)) else ""
            self._write(f"{erase}{fitted(text, columns(sys.stderr))}\n{self._shown}")

    def _forget(self) -> None:
        """Begin without a line, as after a fork: the line is the parent's, and a thread of it may hold the lock."""
        self._lock, self._shown = threading.RLock(), ""

    def _write(self, text: str) -> None:
        if text:
            with suppress(
                OSError, ValueError
            ):  # a stream that is full, hung up or closed costs output, and nothing else
                sys.stderr.write(text)
                sys.stderr.flush()


def _cut(text: str) -> str:
    room = (columns(sys.stderr) or 0) - 1  # with the last column some terminals go to the next line
    if "\x1b" in text or width(text) <= room:
        return text
    kept = text
    while kept and width(kept) + len(_REST) > room:
        kept = kept[:-1]
    return kept + _REST


live_line = LiveLine()
"""Public because a terminal has one last line."""
