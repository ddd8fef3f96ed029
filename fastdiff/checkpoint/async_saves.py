"""Asynchronous saves: a background thread writes them while the training continues."""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed

from fastdiff.console import log
from fastdiff.errors import FastdiffError
from fastdiff.parallel.world import World

_PATIENCE = timedelta(days=1)
"""Timeout for ranks with slow storage; hangs are detected by the training, which runs in parallel."""
_PARTING_S = 300.0
"""Seconds that a running save may take after the run has failed."""
_SILENT_S = 1.0
"""Seconds before a wait is logged, and between two heartbeats of a wait."""
ANY_NUMBER = sys.maxsize


@dataclass(frozen=True, slots=True)
class _Save:
    step: int
    done: Future[None]


class AsyncSaves:
    """A thread that writes saves in the order of their start; a context manager that every rank enters.

    One save of each kind is written at a time. All ranks see a failure at the same call of ``wait`` or
    ``wait_for_all``, because a save fails on all ranks or on none.

    Args:
        world: the ranks.
        allowed: consecutive failed saves of a kind that the run survives.
        beat: heartbeat of this rank while it waits for a save: slow storage is not a hang.
    """

    def __init__(self, world: World, allowed: int, beat: Callable[[], None] = lambda: None) -> None:
        group = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE) if world.size > 1 else None
        self.world = replace(world, device=torch.device("cpu"), group=group)
        """The ranks on the CPU, for use in the thread and before the first save."""
        self._allowed = allowed
        self._beat = beat
        self._group = group
        self._running: dict[str, _Save] = {}
        self._failures: Counter[str] = Counter()
        self._committed: dict[str, int] = {}
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], object]] | None] = queue.SimpleQueue()
        # A pool is not used: the interpreter would join its threads at exit, even if they hang.
        self._thread = threading.Thread(target=self._work, name="saves", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether a save failed on this rank that ``wait`` has not yet reported."""
        return any(save.done.done() and save.done.exception() is not None for save in self._running.values())

    @property
    def running(self) -> bool:
        """Whether a save is being written."""
        return any(not save.done.done() for save in self._running.values())

    def committed(self, what: str) -> int | None:
        """Return the step of the last committed save of a kind, as of the last ``wait``."""
        return self._committed.get(what)

    def restored(self, what: str, step: int) -> None:
        """Note that the step at which the run starts is saved."""
        self._committed[what] = step

    def begin(self, what: str, step: int, save: Callable[[], object]) -> None:
        """Start ``save`` in the thread; call it on all ranks, after ``wait(what)``.

        Args:
            what: the kind, in words: "checkpoint".
            step: step of the saved state.
            save: raises its errors on all ranks or on none; uses only collectives of ``self.world``.
        """
        self._running[what] = _Save(step, Future())
        self._jobs.put((self._running[what].done, save))

    def wait(self, what: str, allowed: int | None = None) -> None:
        """Wait until no save of a kind is running; called by all ranks.

        Args:
            what: the kind.
            allowed: consecutive failures that only cause a warning; None: as many as the run survives.

        Raises:
            FastdiffError: on every rank: it failed more often than allowed.
        """
        save = self._running.get(what)
        if save is None:
            return
        error = self._outcome(what, save)
        del self._running[what]
        if error is None:
            self._failures[what] = 0
            self._committed[what] = save.step
            return
        self._failures[what] += 1
        allowed = self._allowed if allowed is None else allowed
        if self._failures[what] > allowed or not isinstance(error, FastdiffError):
            raise error
        if self.world.is_first:
            count = f"; {self._failures[what]} failed in a row" if self._failures[what] > 1 else ""
            log.warning(f"the {what} of step {save.step} failed{count}, the run continues: {error}")

    def _outcome(self, what: str, save: _Save) -> BaseException | None:
        told = not self.world.is_first
        while not futures.wait([save.done], _SILENT_S).done:
            self._beat()
            if not told:
                log.info(f"waiting: the {what} of step {save.step} is still being written")
                told = True
        return save.done.exception()

    def wait_for_all(self, allowed: int | None = None) -> None:
        """Wait for every kind; see ``wait``."""
        for what in list(self._running):
            self.wait(what, allowed)

    def __enter__(self) -> AsyncSaves:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for running saves; after a failure of the run only for a limited time, since other ranks may be gone.

        After a failure the connections stay open: a lost connection must not end another rank before this one has
        printed its message (``exit_message``).
        """
        self._jobs.put(None)
        until = math.inf if error is None else time.monotonic() + _PARTING_S
        while self._thread.is_alive() and time.monotonic() < until:
            self._beat()
            self._thread.join(_SILENT_S)
        for what, save in self._running.items():
            if self.world.is_first and save.done.done() and save.done.exception() is not None:
                log.warning(f"the {what} of step {save.step} failed: {save.done.exception()}")
        if self._group is not None and error is None and not self._thread.is_alive():
            torch.distributed.destroy_process_group(self._group)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            done, save = job
            try:
                save()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
