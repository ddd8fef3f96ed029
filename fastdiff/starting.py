"""What a run does until its first step, and how long each part takes.

A terminal shows the part while it lasts; any other output gets a line where a part begins after a while of silence. One
line sums all parts up.
"""

import os
import time

from fastdiff.console import log
from fastdiff.live_line import live_line

_SILENT_S = 5.0
_SHORT_S = 0.1
"""Time of a part that is not worth telling."""


class Starting:
    """The start of this process; without ``begin`` nothing is told."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, float]] = []
        self._told_s = 0.0

    def begin(self, what: str) -> None:
        """Begin the start with its first part, on rank 0 of the job."""
        if os.environ.get("RANK", "0") == "0":
            self._told_s = time.monotonic()
            self._parts = [(what, self._told_s)]
            live_line.draw(f"starting: {what} ...")

    def enter(self, what: str) -> None:
        """Begin the next part."""
        if not self._parts:
            return
        now = time.monotonic()
        self._parts.append((what, now))
        so_far = f"starting, {now - self._parts[0][1]:.0f} s so far: {what} ..."
        if not live_line.draw(so_far) and now - self._told_s > _SILENT_S:
            log.info(so_far)
            self._told_s = now

    def end(self) -> None:
        """Say how long everything took."""
        if not self._parts:
            return
        live_line.clear()
        now = time.monotonic()
        ends = [began for _, began in self._parts[1:]] + [now]
        took = {what: end - began for (what, began), end in zip(self._parts, ends, strict=True)}
        told = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in took.items() if seconds > _SHORT_S)
        log.info(f"started in {now - self._parts[0][1]:.1f} s: {told}")
        self._parts = []

    def give_up(self) -> None:
        """Tell nothing more: the start has failed, or was none."""
        if self._parts:
            self._parts = []
            live_line.clear()


starting = Starting()
"""Public because a process starts once."""
