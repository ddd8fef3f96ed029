"""The side of a contestant: it steps in its own process, when it is told to, and says how long each step took."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

Fact = str | int | float | bool | None


class Enough(Exception):
    """The contestant has taken all the steps that were asked for."""


@dataclass(slots=True)
class Steps:
    """The steps of one turn."""

    seconds: list[float]
    """Of each step."""
    phases: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each step by phase, summed where a phase came more than once in a step."""
    cpu_seconds: float = 0.0
    """Processor time since the end of the turn before, all threads, of this process and those it started.

    From there, because what is read ahead for this turn is read while others step.
    """
    allocation_retries: int = 0
    """How often torch's allocator had to give memory back to the GPU before it got some; 0 on a CPU."""

    def without_first(self, count: int) -> Steps:
        """The same without the times of so many steps."""
        return replace(
            self, seconds=self.seconds[count:], phases={name: parts[count:] for name, parts in self.phases.items()}
        )


class Turn:
    """What a contestant holds: it calls ``ready`` once and ``after_step`` after every step, for ever.

    On a GPU the times are those of events on the current stream, read at the end of the turn only. The memory that
    torch's allocator holds in reserve there goes back to the GPU while others step.
    """

    def __init__(self, connection: Connection, device: torch.device, folder: Path | None = None) -> None:
        self._connection = connection
        self._mark: Callable[[], Any] = _event if device.type == "cuda" else time.perf_counter
        self._on_cuda = device.type == "cuda"
        self.device = device
        self.facts: dict[str, Fact] = {}
        """What else is to be known of the contestant in the end."""
        self.folder = folder
        """For files, and deleted after the race, however the contestant ends; None: the system's."""
        self._left = 0
        self._marks: list[Any] = []
        self._phases: list[tuple[str, int, Any, Any]] = []
        self._phase: str | None = None
        self._begun: Any = None
        self._cpu_seconds = 0.0
        self._retries = 0

    def ready(self, **facts: Fact) -> None:
        """Say that everything is built, and wait for the first turn.

        Raises:
            Enough: there is none.
        """
        self._connection.send(("ready", facts))
        self._cpu_seconds = _cpu_seconds()
        self._wait()

    def after_step(self) -> None:
        """Note the end of a step; at the end of the turn, report and wait for the next one.

        Raises:
            Enough: there is none.
        """
        self._marks.append(self._mark())
        self._left -= 1
        if self._left == 0:
            self._connection.send(("steps", self._steps()))
            self._wait()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take the time of a part of a step: ``data``, ``forward``, ``backward``, ``optimizer``, ``ema``, ...

        A phase inside of another one interrupts it.
        """
        outer = self._phase
        self._enter(name)
        yield
        self._enter(outer)

    def _enter(self, name: str | None) -> None:
        """End the phase that lasts, if any, and begin one (None: none)."""
        now = self._mark()
        if self._phase is not None:
            self._phases.append((self._phase, len(self._marks) - 1, self._begun, now))
        self._phase, self._begun = name, now

    def _wait(self) -> None:
        self._left = self._connection.recv()
        if self._left == 0:
            raise Enough
        self._phases.clear()
        self._marks = [self._mark()]

    def _steps(self) -> Steps:
        if self._on_cuda:
            torch.cuda.synchronize()
        count = len(self._marks) - 1
        steps = Steps([self._between(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False)])
        for name, step, begin, end in self._phases:
            if step >= 0:
                steps.phases.setdefault(name, [0.0] * count)[step] += self._between(begin, end)
        before, self._cpu_seconds = self._cpu_seconds, _cpu_seconds()
        steps.cpu_seconds = self._cpu_seconds - before
        if self._on_cuda:
            before_retries, self._retries = self._retries, torch.cuda.memory_stats().get("num_alloc_retries", 0)
            steps.allocation_retries = self._retries - before_retries
            torch.cuda.empty_cache()
        return steps

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) * 1e-3 if self._on_cuda else float(end - begin)


def cpu_seconds_of_started() -> float:
    """Processor time of the processes that this one started, and those that they did, in steps of 10 ms."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


def _cpu_seconds() -> float:
    return time.process_time() + cpu_seconds_of_started()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
