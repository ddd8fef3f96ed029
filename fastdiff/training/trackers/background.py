"""Interface of a tracker, and the thread in which one that talks to a server works."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

from torch import Tensor

from fastdiff import sanitize
from fastdiff.console import log
from fastdiff.sanitize import escape

_WAITING = 256
"""Largest number of queued calls of a tracker."""
_GRACE_S = 5.0
FINISH_S = 60.0
"""Timeout in seconds for the rest at the end of a run, unless the user gives the tracker another."""


class Tracker(Protocol):
    """An experiment tracker."""

    @property
    def finish_s(self) -> float:
        """Timeout in seconds for the rest at the end of a run."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Show numbers by name."""

    def images(self, images: Mapping[str, Tensor], step: int, section: str) -> None:
        """Show uint8 images ``[N, 3, H, W]`` by caption, in a section such as ``validation``."""

    def close(self, *, failed: bool, patience_s: float) -> None:
        """Write the rest within ``patience_s`` seconds, and whether the run ended in an error."""


class BackgroundTracker:
    """Tracker in a separate thread, so that a slow or unreachable server never delays the training.

    Calls that do not fit into the queue are dropped with one warning; ``metrics.jsonl`` has all numbers.

    Args:
        tracker: used by that thread alone from now on.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._warned = False
        self._thread = threading.Thread(target=self._show, name="fastdiff-tracker", daemon=True)
        self._thread.start()

    @property
    def finish_s(self) -> float:
        """Timeout in seconds of the tracker itself."""
        return self._tracker.finish_s

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Queue numbers by name."""
        self._put(partial(self._tracker.scalars, dict(values), step))

    def images(self, images: Mapping[str, Tensor], step: int, section: str) -> None:
        """Queue uint8 images ``[N, 3, H, W]`` by caption."""
        self._put(partial(self._tracker.images, dict(images), step, section))

    def close(self, *, failed: bool, patience_s: float) -> None:
        """Send the queued calls, as far as the server accepts them within ``patience_s`` seconds."""
        end = time.monotonic() + patience_s
        for last in (partial(self._tracker.close, failed=failed, patience_s=patience_s), None):
            with suppress(queue.Full):
                self._waiting.put(last, timeout=max(0.0, end - time.monotonic()))
        self._thread.join(max(0.0, end - time.monotonic()) + min(_GRACE_S, patience_s))
        if self._thread.is_alive():
            self._warn(f"did not take all within {patience_s:g} s")

    def _put(self, action: Callable[[], None]) -> None:
        try:
            self._waiting.put_nowait(action)
        except queue.Full:
            self._warn("does not keep up")

    def _show(self) -> None:
        while (action := self._waiting.get()) is not None:
            try:
                action()
            except Exception as error:  # trackers raise errors of their own classes
                self._warn(f"failed ({escape(sanitize.message(str(error)) or type(error).__name__)})")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(f"a tracker of --output.report_to {what}; all numbers are in metrics.jsonl")
