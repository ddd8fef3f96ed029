"""The signals of a supervisor: taken in turn while it watches, raised as an exception while it prepares."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Requests to save and stop; SIGHUP: the connection over which this was started is gone."""


def heeded(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return those of ``signals`` that this process was not started to ignore, as by ``nohup``."""
    return [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]


class Interrupted(BaseException):
    """Ends what the main thread does; no ``except Exception`` holds it up."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Signals:
    """What this process is told, including that a child ended; a context, in the main thread."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._raise_if: Callable[[int], str | None] | None = None
        self._before: dict[int, signal.Handlers | int | Callable[..., object] | None] = {}
        self._main = threading.main_thread().ident or 0

    def __enter__(self) -> Signals:
        """Take over the signals."""
        self._before = {number: signal.signal(number, self._handle) for number in [*heeded(STOP), signal.SIGCHLD]}
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reader)
        os.close(self._writer)

    def take(self, timeout_s: float) -> list[int]:
        """Return the signals since the last call; wait for one at most ``timeout_s``."""
        if select.select([self._reader], [], [], max(0.0, timeout_s))[0]:
            return list(os.read(self._reader, 4096))
        return []

    def wake(self) -> None:
        """Let ``take`` return, from any thread: as if a child had ended."""
        signal.pthread_kill(self._main, signal.SIGCHLD)

    @contextlib.contextmanager
    def raising(self, reason: Callable[[int], str | None]) -> Iterator[None]:
        """Raise Interrupted wherever the main thread is, when ``reason(signal)`` gives one."""
        self._raise_if = reason
        try:
            yield
        finally:
            self._raise_if = None

    def _handle(self, number: int, _: object) -> None:
        found = self._raise_if(number) if self._raise_if is not None else None
        if found is not None:
            self._raise_if = None
            raise Interrupted(found)
