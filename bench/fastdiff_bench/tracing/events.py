"""Events of a trace in the format of torch's profiler (Kineto)."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff_bench import BenchError

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""Beginnings of the names of the calls that launch a kernel or a graph."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event; times are microseconds on one clock."""

    name: str
    begin: float
    end: float
    thread: Any = None
    """Of the host."""
    correlation: int = 0
    """Number that a kernel shares with the call that launched it; 0: none."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace of one process with ranges named ``step N``."""

    host: Sequence[Event]
    """Operators and named ranges in the order of their beginning; those inside of others after them."""
    calls: Sequence[Event]
    """Calls of the CUDA runtime."""
    device: Sequence[Event]
    """Kernels, copies and fills on a GPU; empty on a CPU."""

    @property
    def steps(self) -> list[Event]:
        """The ranges of the steps."""
        return [event for event in self.host if event.name.startswith("step ")]

    @property
    def launches(self) -> list[Event]:
        """Calls that launch a kernel or a graph."""
        return [event for event in self.calls if event.name.startswith(_LAUNCHES)]


def read(path: Path) -> Trace:
    """Read a trace of ``--performance.profile`` or ``bench step --trace``.

    Raises:
        BenchError: it has no steps, or cannot be read.
    """
    try:
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise BenchError(f"{path}: expected a gzipped trace of torch's profiler ({error})") from None
    trace = parse(events)
    if not trace.steps:
        raise BenchError(f"{path}: the trace has no range named step N; make it with bench step --trace")
    return trace


def parse(events: Sequence[dict[str, Any]]) -> Trace:
    """Sort the complete events of a trace by where they ran."""
    found: dict[str, list[Event]] = {"host": [], "calls": [], "device": []}
    for event in events:
        place = _place(event.get("cat", ""))
        if event.get("ph") == "X" and place:
            begin = float(event["ts"])
            correlation = int(event.get("args", {}).get("correlation", 0))
            end = begin + float(event.get("dur", 0.0))
            found[place].append(Event(event["name"], begin, end, event.get("tid"), correlation))
    for part in found.values():
        part.sort(key=lambda event: (event.begin, -event.end))
    return Trace(**found)


def _place(category: str) -> str:
    if category in _ON_DEVICE:
        return "device"
    if category in _CALLS:
        return "calls"
    return "host" if category in ("cpu_op", "user_annotation") else ""
