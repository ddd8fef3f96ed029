"""How long calls take, measured against one another.

Calls take turns (A, B, A, B, ...), so that a change of clock or load meets all of them alike. Before each, a large
buffer is read, which empties the caches, leaves no write-back for the call to pay, and keeps a GPU busy while the host
queues the call: what is measured is the work, not its launch, unless the launch takes longer than reading the buffer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bench import BenchError

Call = Callable[[], object]

_ROUNDS_PER_READING = 10
_FLUSHED_BYTES = {"cuda": 2**30, "cpu": 2**25}


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    repetitions: int
    """Of each call, at least."""
    seconds: float
    """That each call runs in total, at least, if that is possible in ``limit_seconds``."""
    limit_seconds: float
    """After which there are no more repetitions than ``repetitions``."""
    warm_up_seconds: float


FULL = Effort(repetitions=20, seconds=0.1, limit_seconds=1.0, warm_up_seconds=0.1)
QUICK = Effort(repetitions=3, seconds=0.0, limit_seconds=0.0, warm_up_seconds=0.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """What the repetitions of a call gave: seconds, or the rate that they mean."""

    median: float
    p20: float
    """20 % gave no more."""
    p80: float
    repetitions: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summarise the repetitions, two at least."""
        tenths = statistics.quantiles(seconds, n=10, method="inclusive")
        return cls(statistics.median(seconds), tenths[1], tenths[7], len(seconds))

    def per_second(self, amount: float) -> Timing:
        """The rate, if ``amount`` is done in these seconds."""
        return Timing(amount / self.median, amount / self.p80, amount / self.p20, self.repetitions)

    def times(self, factor: float) -> Timing:
        """The same in another unit."""
        return Timing(factor * self.median, factor * self.p20, factor * self.p80, self.repetitions)


class Stopwatch:
    """Times calls on one device."""

    def __init__(self, device: str, effort: Effort) -> None:
        """Take ``cuda`` or ``cpu``.

        Raises:
            BenchError: there is no CUDA device.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise BenchError("there is no CUDA device to measure on; use --device cpu to try the harness")
        self._device = device
        self._effort = effort
        self._flushed = torch.zeros(_FLUSHED_BYTES[device] // 4, dtype=torch.int32, device=device)
        self._time = _time_on_gpu if device == "cuda" else _time_on_host

    def measure(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        """Time calls in turns."""
        effort, began = self._effort, time.perf_counter()
        while True:
            self._rounds(calls, 1)
            if time.perf_counter() - began >= effort.warm_up_seconds:
                break
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        done, began = 0, time.perf_counter()
        while done < effort.repetitions or (
            min(map(sum, seconds.values())) < effort.seconds and time.perf_counter() - began < effort.limit_seconds
        ):
            rounds = min(_ROUNDS_PER_READING, effort.repetitions)
            for name, more in self._rounds(calls, rounds).items():
                seconds[name] += more
            done += rounds
        return {name: Timing.of(values) for name, values in seconds.items()}

    def _rounds(self, calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
        readings: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                self._flushed.max()
                readings[name].append(self._time(call))
        if self._device == "cuda":
            torch.cuda.synchronize()
        return {name: [reading() for reading in taken] for name, taken in readings.items()}


def _time_on_gpu(call: Call) -> Callable[[], float]:
    """Queue a call between two events; the seconds between them can be read once the device is through."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    return lambda: begin.elapsed_time(end) * 1e-3


def _time_on_host(call: Call) -> Callable[[], float]:
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    return lambda: seconds
