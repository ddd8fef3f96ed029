"""Time of the traced steps by class, and their launches by phase.

Each instant between the beginning of the first and the end of the last step belongs to exactly one class or to
``idle``, so that they add up to the wall time by construction. On a CPU it belongs to the innermost operator that the
thread of the loop executes; on a GPU to a kernel that runs, computation before communication before copies.
"""

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fastdiff_bench.tracing.classes import CLASSES, IDLE, Class, is_operator, of_kernel, of_operator
from fastdiff_bench.tracing.events import Event, Trace

PHASES = {
    "data": "data", "forward": "forward", "objective": "forward", "backward": "backward", "optimizer": "step",
    "consensus": "step", "averages": "averages", "callbacks": "other",
}  # fmt: skip
"""Phase by named range; the rest is ``other``."""
_RANK: dict[Class | None, int] = {"communication": 1, "copies": 2}
"""Of kernels that run at once, the one with the lowest number counts."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of the steps went; all times are seconds per step."""

    steps: int
    wall: float
    seconds: dict[str, float]
    """By class, and ``idle``."""
    operations: dict[str, float]
    """Kernels, or on a CPU outermost operators, per step and class."""
    launches: dict[str, float]
    """Kernels, or on a CPU outermost operators, launched per step and phase."""
    on_device: bool
    """Whether the times are those of a GPU."""

    @property
    def idle_share(self) -> float:
        """Share of the time without any operation."""
        return self.seconds[IDLE] / self.wall


@dataclass(slots=True)
class _Open:
    """An event that has begun on the host."""

    event: Event
    kind: Class | None
    outermost: bool
    """Whether it is an operator that no other operator calls."""


def break_down(trace: Trace) -> Breakdown:
    """Return the breakdown of a trace with at least one step."""
    trace = _from_first_step(trace)
    begin, steps = trace.steps[0].begin, trace.steps
    end = max([steps[-1].end, *(event.end for event in trace.device)])
    phase_at = _phase_at(trace)
    operations: Counter[str] = Counter()
    launches: Counter[str] = Counter(dict.fromkeys([*PHASES.values(), "other"], 0))
    if trace.device:
        kinds = _kernel_classes(trace)
        timed = _by_rank(trace.device, kinds)
        operations.update(kinds)
        launches.update(phase_at(event.begin) for event in trace.launches)
    else:
        thread = steps[0].thread
        host = [event for event in trace.host if event.thread == thread and begin <= event.begin < end]
        timed = _innermost(host)
        for opened in _opened(host):
            if opened.outermost and opened.kind is not None:
                operations[opened.kind] += 1
                launches[phase_at(opened.event.begin)] += 1
    seconds = dict.fromkeys([*CLASSES, IDLE], 0.0)
    for kind, since, until in timed:
        seconds[kind or IDLE] += max(0.0, min(until, end) - max(since, begin)) * 1e-6 / len(steps)
    wall = (end - begin) * 1e-6 / len(steps)
    seconds[IDLE] = wall - sum(seconds[kind] for kind in CLASSES)
    return Breakdown(
        steps=len(steps),
        wall=wall,
        seconds=seconds,
        operations={kind: number / len(steps) for kind, number in operations.items()},
        launches={phase: number / len(steps) for phase, number in launches.items()},
        on_device=bool(trace.device),
    )


def _from_first_step(trace: Trace) -> Trace:
    """Return a trace without what was launched before its first step, such as in the step that warms up."""
    begin = trace.steps[0].begin
    launched = {event.correlation: event.begin for event in trace.calls}
    return replace(
        trace,
        calls=[event for event in trace.calls if event.begin >= begin],
        device=[event for event in trace.device if launched.get(event.correlation, event.begin) >= begin],
    )


def _opened(host: Iterable[Event]) -> Iterator[_Open]:
    """Yield the events of one thread with their classes, each after the one that it lies in."""
    stack: list[_Open] = []
    for event in host:
        while stack and stack[-1].event.end <= event.begin:
            stack.pop()
        kind = of_operator(event.name, stack[-1].kind if stack else None)
        called = any(is_operator(opened.event.name) for opened in stack)
        stack.append(_Open(event, kind, is_operator(event.name) and not called))
        yield stack[-1]


def _innermost(host: Sequence[Event]) -> Iterator[tuple[Class | None, float, float]]:
    """Yield (class, begin, end) of the innermost event of one thread, without overlap."""
    stack: list[_Open] = []
    now = host[0].begin
    for opened in _opened(host):
        while stack and stack[-1].event.end <= opened.event.begin:
            last = stack.pop()
            yield last.kind, now, last.event.end
            now = max(now, last.event.end)
        if stack:
            yield stack[-1].kind, now, opened.event.begin
        now = opened.event.begin
        stack.append(opened)
    while stack:
        last = stack.pop()
        yield last.kind, now, last.event.end
        now = max(now, last.event.end)


def _kernel_classes(trace: Trace) -> list[Class]:
    """Return the class of each event on the device, by its name and by what launched it."""
    calls = {event.correlation: event for event in trace.calls}
    by_thread: dict[object, list[Event]] = {}
    for event in trace.host:
        by_thread.setdefault(event.thread, []).append(event)
    around = {thread: _Timeline(_innermost(events)) for thread, events in by_thread.items()}
    optimizer = _Timeline(("optimizer", e.begin, e.end) for e in trace.host if e.name in ("optimizer", "averages"))
    found = []
    for event in trace.device:
        call = calls.get(event.correlation)
        within: Class | None = None
        if call is not None:
            within = optimizer.at(call.begin)
            if within is None and call.thread in around:
                within = around[call.thread].at(call.begin)
        found.append(of_kernel(event.name, within))
    return found


def _by_rank(device: Sequence[Event], kinds: Sequence[Class]) -> Iterator[tuple[Class | None, float, float]]:
    """Yield (class, begin, end) of the event on the device that counts, without overlap."""
    edges = sorted(
        [(event.begin, 1, kind) for event, kind in zip(device, kinds, strict=True)]
        + [(event.end, -1, kind) for event, kind in zip(device, kinds, strict=True)],
        key=lambda edge: edge[:2],
    )
    running: Counter[Class] = Counter()
    now = edges[0][0]
    for at, change, kind in edges:
        active = [other for other, number in running.items() if number > 0]
        yield min(active, key=lambda other: _RANK.get(other, 0), default=None), now, at
        now = at
        running[kind] += change


class _Timeline:
    """Names of intervals without overlap, looked up by time."""

    def __init__(self, intervals: Iterable[tuple[Class | None, float, float]]) -> None:
        self._found = sorted((begin, end, kind) for kind, begin, end in intervals if kind is not None and end > begin)
        self._begins = [begin for begin, _, _ in self._found]

    def at(self, time: float) -> Class | None:
        """Return the name at a time, if any."""
        number = bisect.bisect_right(self._begins, time) - 1
        if number < 0 or time >= self._found[number][1]:
            return None
        return self._found[number][2]


def _phase_at(trace: Trace) -> Callable[[float], str]:
    """Return a function from a time to the innermost phase of the loop, whichever thread acts then, or ``other``."""
    ranges = [event for event in trace.host if event.name in PHASES]
    begins = [event.begin for event in ranges]

    def phase(time: float) -> str:
        number = bisect.bisect_right(begins, time)
        around = ranges[max(0, number - 3) : number]  # they lie at most two deep
        return next((PHASES[event.name] for event in reversed(around) if time < event.end), "other")

    return phase
