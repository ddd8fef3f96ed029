"""Progress of long work on standard error: a line drawn over on a terminal, a plain line now and then elsewhere.

At 80 columns the line has the count, the figures of the work, its rate and the time to its end, each of them whole; the
name, the bar and further figures take the room that is left. Nothing here starts a thread: a line changes when the work
moves on, at most four times a second.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from fastdiff.console import log
from fastdiff.live_line import live_line
from fastdiff.terminal import columns, redraws, width

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
_REDRAW_S = 0.25
_FIRST_S, _RAREST_S = 10.0, 30.0
"""Time between plain lines: a tenth of the time so far, within these bounds."""
_POINTS = 240
"""Of the window of the rate: a minute of a terminal."""
_GAP = "  "
_LONGEST_NAME = 24
_BAR, _LONGEST_BAR = 8, 40
"""Columns of a bar."""
_DAY_S = 86400
_PLAIN = re.compile(r" INFO [^\n]{1,200}: [\d,]+(/[\d,]+)? \w+, ")
_open: list[Bar] = []
"""Bars of this process; the last of them is shown."""


class Bar:
    """Progress of one piece of work; a context.

    Args:
        what: name of the work.
        total: amount; None: unknown.
        unit: of the amounts, in the plural.
        done: amount that was there before.
        rate: factor and unit of the rate, such as (64, "images") of a step; default: 1 and the unit.
        shown: whether this process shows it.
        alone: False: other processes have bars on the same terminal, where each then writes plain lines.
        keeps: leave the last state on the terminal.
    """

    def __init__(
        self,
        what: str,
        total: float | None,
        unit: str,
        *,
        done: float = 0,
        rate: tuple[float, str] | None = None,
        shown: bool = True,
        alone: bool = True,
        keeps: bool = False,
    ) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, done
        self.figures: Sequence[str] = ()
        """Figures of the work, such as ``loss 0.0312``, the most important first."""
        self.further: Sequence[str] = ()
        """Figures for which a terminal may lack the room."""
        self._rate = rate or (1, unit)
        self._keeps, self._told = keeps, done
        self._is_shown = shown and log.isEnabledFor(logging.INFO)
        self._is_live = self._is_shown and alone and redraws(sys.stderr)
        self._began = self._due = time.monotonic()
        self._window = deque([(self._began, done)], maxlen=_POINTS)
        _open.append(self)
        if self._is_live:
            self._refresh(self._began)
        else:
            self._due += _FIRST_S

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, amount: float = 1) -> None:
        """Add to what is done."""
        self.done += amount
        if self._is_shown and (now := time.monotonic()) >= self._due:
            self._refresh(now)

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items; each counts as done when the next is asked for."""
        for item in items:
            yield item
            self.update()

    def close(self) -> None:
        """Leave the last state, or take the line away; a bar below is shown again."""
        if self not in _open:
            return
        was_on_top = _open[-1] is self
        _open.remove(self)
        now = time.monotonic()
        if self._is_live and was_on_top:
            if self._keeps:
                live_line.draw(self._line(now, ended=True))
                live_line.keep()
            else:
                live_line.clear()
            if _open and _open[-1]._is_live:
                _open[-1]._refresh(now)
        elif self._is_shown and not self._is_live and self.done != self._told and self._due > self._began + _FIRST_S:
            log.info(self._in_words(now, ended=True))

    def _refresh(self, now: float) -> None:
        self._window.append((now, self.done))
        if not self._is_live:
            log.info(self._in_words(now))
            self._told = self.done
            self._due = now + min(max((now - self._began) / 10, _FIRST_S), _RAREST_S)
            return
        self._due = now + _REDRAW_S
        if _open[-1] is self:
            live_line.draw(self._line(now))

    def _in_words(self, now: float, ended: bool = False) -> str:
        share = [] if self.total is None else [f"{self._share:.0%}"]
        return f"{self.what}: {', '.join([self._count, *share, *self._facts(now, ended), *self.further])}"

    def _line(self, now: float, ended: bool = False) -> str:
        """Return the text of a terminal: facts, and what else there is room for."""
        room = (columns(sys.stderr) or 0) - 1  # with the last column some terminals go to the next line
        facts: list[str] = []
        for fact in (self._count, *self._facts(now, ended)):
            facts += [fact] * (width(_GAP.join([*facts, fact])) <= room)
        room -= width(_GAP.join(facts))
        name = self.what if width(self.what) <= _LONGEST_NAME else f"{self.what[: _LONGEST_NAME - 3]}..."
        before = []
        if width(name) + len(_GAP) <= room:
            before.append(name)
            room -= width(name) + len(_GAP)
        share = "" if self.total is None else f"{self._share:4.0%} "
        bar = bool(share) and room >= len(share) + _BAR + len(_GAP)
        room -= (len(share) + _BAR + len(_GAP)) * bar
        for fact in self.further:
            if len(_GAP) + width(fact) <= room:
                facts.append(fact)
                room -= len(_GAP) + width(fact)
        if bar:
            before.append(share + _drawn(self._share, min(_BAR + room, _LONGEST_BAR)))
        return _GAP.join([*before, *facts])

    @property
    def _share(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 1.0

    @property
    def _count(self) -> str:
        if self.total is None:
            return f"{self.done:,.0f} {self.unit}"
        return f"{self.done:,.0f}/{self.total:,.0f} {self.unit}"

    def _facts(self, now: float, ended: bool) -> Iterator[str]:
        """Yield the figures, the rate and the time that is left; at the end, the time that it took."""
        yield from self.figures
        first, done = (self._began, self._window[0][1]) if ended else self._window[0]
        speed = (self.done - done) / (now - first) if now > first else 0.0
        if speed:
            factor, unit = self._rate
            yield f"{_rounded(factor * speed)} {unit}/s"
        if ended or self.total is None:
            yield f"in {_clock(now - self._began)}"
        elif speed:
            yield f"ETA {_clock(max(self.total - self.done, 0) / speed)}"


def is_plain_line(line: str) -> bool:
    """Return whether a line of a log is one that a bar has written, because there is no terminal."""
    return _PLAIN.search(line) is not None


def _drawn(share: float, room: int) -> str:
    from rich.progress_bar import ProgressBar

    console = _console()
    with console.capture() as found:
        console.print(ProgressBar(1.0, share, room), end="")
    drawn = found.get()
    return drawn if console.color_system and not console.no_color else drawn.ljust(room)  # which draws no empty part


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, force_terminal=True, force_jupyter=False, highlight=False)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def _clock(seconds: float) -> str:
    """Return a time as ``m:ss``, ``h:mm:ss`` or, from a day on, ``d d h h``."""
    whole = round(seconds)
    if whole >= _DAY_S:
        return f"{whole // _DAY_S} d {whole % _DAY_S // 3600} h"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
