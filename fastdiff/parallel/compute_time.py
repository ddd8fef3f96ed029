"""Compute time of this rank per step, to detect stragglers."""

import time
from collections.abc import Callable

import torch


class ComputeTime:
    """Seconds from the start of each step to the end of this rank's last forward pass in it.

    Where a rank waits for no other up to there, the time tells which rank computes more slowly and keeps the others
    waiting: at ZeRO-0 and 1, by DeepSpeed or flat. ZeRO-2 exchanges gradients in the backward pass of each micro-batch,
    after which all ranks are even: only what follows the last exchange differs. ZeRO-3 gathers weights in the forward
    pass: no rank that computes slowly stands out. On a GPU two events in the stream measure it. Their difference is
    read at the start of the next step, when the host has waited for a later event of the stream anyway.

    Args:
        device: of this rank.
        clock: of the host, in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._began = self._ended = 0.0
        self._marked = False
        self._seconds = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._count()
        if self._events:
            self._events[0].record()
        self._began = self._clock()

    def mark(self) -> None:
        """Mark an end of own work; the last mark of a step counts."""
        if self._events:
            self._events[1].record()
        self._ended = self._clock()
        self._marked = True

    def read(self) -> float:
        """Return the seconds since the last read, of all steps that have ended."""
        self._count()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _count(self) -> None:
        marked, self._marked = self._marked, False
        if not marked:
            return
        if not self._events:
            self._seconds += self._ended - self._began
        elif self._events[1].query():  # type: ignore[no-untyped-call]
            self._seconds += self._events[0].elapsed_time(self._events[1]) / 1e3
