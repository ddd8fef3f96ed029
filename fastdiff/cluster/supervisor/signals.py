"""Signals of a supervisor: queued while it watches, raised as exceptions while it prepares."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Requests to save and stop; SIGHUP reports the loss of the terminal or connection."""


def heeded(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return ``signals`` without those that this process ignores since its start, for example under ``nohup``."""
    return [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]


class Interrupted(BaseException):
    """A signal that ends the main thread's work; ``except Exception`` does not catch it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Signals:
    """Queue of the signals of this process, SIGCHLD included; a context manager for the main thread."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._raise_if: Callable[[int], str | None] | None = None
        self._before: dict[int, signal.Handlers | int | Callable[..., object] | None] = {}
        self._main = threading.main_thread().ident or 0

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._handle) for number in [*heeded(STOP), signal.SIGCHLD]}
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reader)
        os.close(self._writer)

    def take(self, timeout_s: float) -> list[int]:
        """Return the signals since the last call; wait at most ``timeout_s`` for the first."""
        if select.select([self._reader], [], [], max(0.0, timeout_s))[0]:
            return list(os.read(self._reader, 4096))
        return []

    def wake(self) -> None:
        """Let ``take`` return as if a child had ended; callable from any thread."""
        signal.pthread_kill(self._main, signal.SIGCHLD)

    @contextlib.contextmanager
    def raising(self, reason: Callable[[int], str | None]) -> Iterator[None]:
        """Raise Interrupted in the main thread at each signal for which ``reason(signal)`` is not None."""
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
