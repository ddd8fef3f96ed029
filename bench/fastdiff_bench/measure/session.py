"""A program's side of an interleaved run: it steps in its own process on request and reports the step times."""

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

from fastdiff.training.metrics import peak_resident_bytes

Fact = str | int | float | bool | None


class Enough(Exception):
    """The program has taken all requested steps."""


@dataclass(slots=True)
class Steps:
    """Steps of one session."""

    seconds: list[float]
    """Seconds of each step."""
    phases: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each step by phase, summed if a phase occurs more than once in a step."""
    cpu_seconds: float = 0.0
    """Processor time since the end of the last session, all threads, of this process and its children.

    It includes the time between sessions, because batches are read ahead then.
    """
    allocation_retries: int = 0
    """Number of times that torch's allocator had to return memory to the GPU before an allocation; 0 on a CPU."""

    def without_first(self, count: int) -> Steps:
        """Return the steps without the times of the first ``count``; of the processor time all take equal parts."""
        return replace(
            self,
            seconds=self.seconds[count:],
            phases={name: parts[count:] for name, parts in self.phases.items()},
            cpu_seconds=self.cpu_seconds * (1 - count / len(self.seconds)),
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """Largest memory use of a program (its first rank) in bytes."""

    resident: int
    """High-water mark of the process."""
    allocated: int | None = None
    """Peak of tensors on the GPU; None without a GPU."""
    reserved: int | None = None
    """Peak of torch's allocator on the GPU; None without a GPU."""

    @property
    def peak(self) -> int:
        """Peak on the device of the computation."""
        return self.resident if self.allocated is None else self.allocated

    @property
    def peaks(self) -> dict[str, int]:
        """All peaks by the names of their quantities."""
        found = {"resident": self.resident, "allocated": self.allocated, "reserved": self.reserved}
        return {f"peak {kind}": size for kind, size in found.items() if size is not None}

    @classmethod
    def here(cls, device: torch.device) -> Memory:
        """Return that of this process so far."""
        if device.type != "cuda":
            return cls(peak_resident_bytes())
        return cls(peak_resident_bytes(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


class StepTimer:
    """Step timer of a program in an interleaved run: call ``ready`` once, then ``after_step`` after every step.

    On a GPU the times are those of events on the current stream, read only at the end of a session. Unused memory that
    torch's allocator reserves is returned to the GPU while other programs step.
    """

    def __init__(self, connection: Connection, device: torch.device, folder: Path | None = None) -> None:
        self._connection = connection
        self._mark: Callable[[], Any] = _event if device.type == "cuda" else time.perf_counter
        self._on_cuda = device.type == "cuda"
        self.device = device
        self.facts: dict[str, Fact] = {}
        """Additional facts, reported at the end."""
        self.folder = folder
        """Folder for files, deleted after the run however the program ends; None: the system's."""
        self.sessions = 0
        """Sessions that have begun, the warm-up among them."""
        self._left = 0
        self._marks: list[Any] = []
        self._phases: list[tuple[str, int, Any, Any]] = []
        self._phase: str | None = None
        self._begun: Any = None
        self._cpu_seconds = 0.0
        self._retries = 0

    def ready(self, **facts: Fact) -> None:
        """Report that everything is built, and wait for the first session; Enough if there is none."""
        self._connection.send(("ready", facts))
        self._cpu_seconds = _cpu_seconds()
        self._wait()

    def after_step(self) -> None:
        """Record the end of a step; at the end of the session, report and wait for the next one.

        Raises:
            Enough: there is none.
        """
        self._marks.append(self._mark())
        self._left -= 1
        if self._left == 0:
            self._connection.send(("steps", (self._steps(), dict(self.facts), Memory.here(self.device))))
            self._wait()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase of a step: ``data``, ``forward``, ``backward``, ``optimizer``, ``ema``, ...

        An inner phase interrupts the outer one.
        """
        outer = self._phase
        self._enter(name)
        yield
        self._enter(outer)

    def _enter(self, name: str | None) -> None:
        """End the current phase, if any, and begin another one (None: none)."""
        now = self._mark()
        if self._phase is not None:
            self._phases.append((self._phase, len(self._marks) - 1, self._begun, now))
        self._phase, self._begun = name, now

    def _wait(self) -> None:
        self._left = self._connection.recv()
        if self._left == 0:
            raise Enough
        self.sessions += 1
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
    """Return the processor time of all child processes, recursively, in steps of 10 ms."""
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
