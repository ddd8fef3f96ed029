"""Timing of calls, interleaved.

Calls alternate (A, B, A, B, ...), so that a change of clock or load affects all alike. Before each call a large buffer
is read. This empties the caches, leaves no write-back to the call, and keeps a GPU busy while the host queues the call.
So the measurement covers the work and not its launch, unless the launch takes longer than reading the buffer; that case
is detected and reported (``Timing.launch_bound``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

Call = Callable[[], object]
Reading = tuple[float, float]
"""Seconds of a call, and an upper bound of the seconds that the device waited for the host."""

_ROUNDS_PER_READING = 10
_FLUSHED_BYTES = {"cuda": 2**30, "cpu": 2**25}
_NEGLIGIBLE_SHARE = 0.05
"""Share of the time that the device may have waited for the host before it matters."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Duration of a measurement."""

    repetitions: int
    """Least repetitions of each call."""
    seconds: float
    """Least total seconds of each call, if ``limit_seconds`` allows."""
    limit_seconds: float
    """Seconds after which only ``repetitions`` are completed."""
    warm_up_seconds: float


FULL = Effort(repetitions=20, seconds=0.1, limit_seconds=1.0, warm_up_seconds=0.1)
QUICK = Effort(repetitions=3, seconds=0.0, limit_seconds=0.0, warm_up_seconds=0.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Statistics of the repetitions of a call: seconds, or a rate."""

    median: float
    p20: float
    """20th percentile."""
    p80: float
    repetitions: int
    launch_bound: bool = False
    """Whether the device may have waited for the host for a relevant part of this time."""

    @classmethod
    def of(cls, seconds: Sequence[float], waited: Sequence[float] = (0.0,)) -> Timing:
        """Summarize at least two repetitions.

        Args:
            seconds: of each repetition.
            waited: upper bounds of the seconds that the device waited for the host.
        """
        tenths = statistics.quantiles(seconds, n=10, method="inclusive")
        median = statistics.median(seconds)
        launch_bound = statistics.median(waited) > _NEGLIGIBLE_SHARE * median
        return cls(median, tenths[1], tenths[7], len(seconds), launch_bound)

    def per_second(self, amount: float) -> Timing:
        """Return the rate of ``amount`` per these seconds."""
        return replace(self, median=amount / self.median, p20=amount / self.p80, p80=amount / self.p20)

    def times(self, factor: float) -> Timing:
        """Convert to another unit."""
        return replace(self, median=factor * self.median, p20=factor * self.p20, p80=factor * self.p80)


class Stopwatch:
    """Stopwatch for calls on one device."""

    def __init__(self, device: str, effort: Effort) -> None:
        """Prepare for ``cuda`` or ``cpu``."""
        self._device = device
        self._effort = effort
        self._flushed = torch.zeros(_FLUSHED_BYTES[device] // 4, dtype=torch.int32, device=device)
        self._time = _time_on_gpu if device == "cuda" else _time_on_host

    def measure(self, calls: Mapping[str, Call]) -> dict[str, Timing]:
        """Time calls, interleaved."""
        effort, began = self._effort, time.perf_counter()
        while True:
            self._rounds(calls, 1)
            if time.perf_counter() - began >= effort.warm_up_seconds:
                break
        readings: dict[str, list[Reading]] = {name: [] for name in calls}
        done, began = 0, time.perf_counter()
        while done < effort.repetitions or (
            min(sum(seconds for seconds, _ in taken) for taken in readings.values()) < effort.seconds
            and time.perf_counter() - began < effort.limit_seconds
        ):
            rounds = min(_ROUNDS_PER_READING, effort.repetitions)
            for name, more in self._rounds(calls, rounds).items():
                readings[name] += more
            done += rounds
        return {name: Timing.of(*zip(*taken, strict=True)) for name, taken in readings.items()}

    def _rounds(self, calls: Mapping[str, Call], rounds: int) -> dict[str, list[Reading]]:
        readings: dict[str, list[Callable[[], Reading]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                readings[name].append(self._time(self._flushed.max, call))
        if self._device == "cuda":
            torch.cuda.synchronize()
        return {name: [reading() for reading in taken] for name, taken in readings.items()}


def _time_on_gpu(flush: Call, call: Call) -> Callable[[], Reading]:
    """Queue both calls, each between two events, which can be read once the device has finished.

    The device waits for the host only if it reaches the call before the whole call is queued. It starts the flush no
    earlier than the host, so it waits at most for the host's queueing time minus the duration of the flush.
    """
    before, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    before.record()
    flush()
    begin.record()
    call()
    end.record()
    queued, behind = time.perf_counter() - began, not begin.query()  # type: ignore[no-untyped-call]

    def reading() -> Reading:
        waited = 0.0 if behind else max(0.0, queued - before.elapsed_time(begin) * 1e-3)
        return begin.elapsed_time(end) * 1e-3, waited

    return reading


def _time_on_host(flush: Call, call: Call) -> Callable[[], Reading]:
    flush()
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    return lambda: (seconds, 0.0)
