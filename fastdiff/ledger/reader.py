"""Sums of a ledger: every second since the first start has one class, and every step is kept or lost."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fastdiff.errors import ConfigError
from fastdiff.json_lines import Record, open_lines, record_of, whole_lines, why_no_record
from fastdiff.ledger.records import FILE, OUT_OF_MEMORY
from fastdiff.sanitize import escape

Class = Literal[
    "step kept", "step lost", "data wait", "compile", "start", "save", "validation", "sampling", "stop", "queue",
    "unknown",
]  # fmt: skip
CLASSES: tuple[Class, ...] = get_args(Class)
Seconds = dict[Class, float]
_CLASS_OF: dict[str, Class] = {
    "start": "start", "compile": "compile", "data wait": "data wait", "validation": "validation",
    "sampling": "sampling", "drawing": "sampling", "save": "save", "rewind": "step lost", "stop": "stop",
}  # fmt: skip
"""Class of each account of the trainer but ``step``; old records call ``sampling`` ``drawing``."""
_UNAVAILABLE, _SIGNALLED = 69, 128
"""Exit code after a hang, or a node that was lost; least exit code after a signal."""


@dataclass(slots=True)
class Start:
    """One start of the run: a process per rank, from its begin to the last that is known of it."""

    began: float
    """Wall-clock time in seconds since 1970; of a Slurm job, from which on its nodes are held."""
    nodes: Sequence[str]
    """Host of each rank."""
    samples: int
    """Of a step, over all ranks."""
    ended: float = 0.0
    resumed: int = 0
    """Step from which it continued."""
    steps_kept: int = 0
    steps_lost: int = 0
    seconds: Seconds = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    """From ``began`` to ``ended``."""
    outcome: str = ""
    """How it ended; empty: it still runs, or was killed without a supervisor and has not been started again."""
    message: str = ""
    """Text of the error that ended it; empty: none is known."""
    late_s: dict[int, float] = field(default_factory=dict)
    """By rank, the seconds for which the others waited until it had ended its forward passes."""
    others_s: float = 0.0
    """Seconds that the ranks other than the slowest needed up to there, the median of them."""
    joules: float = 0.0
    """Of a GPU, in the ``measured_s`` with a measured power."""
    measured_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds for which it held its nodes."""
        return sum(self.seconds.values())

    @property
    def gpu_hours(self) -> float:
        """Hours times ranks."""
        return self.wall_s * len(self.nodes) / 3600


@dataclass(slots=True)
class Span:
    """The time between two records; the spans of a ledger follow one another without gaps."""

    start: int
    """Index of the start that it belongs to, or follows."""
    began: float
    ended: float
    step: int
    """Reached at its end."""
    seconds: Seconds
    """By class; those that have none are left out."""


@dataclass(frozen=True, slots=True)
class Sums:
    """The whole ledger of a run."""

    starts: Sequence[Start]
    between: Seconds
    """Seconds between two starts."""
    spans: Sequence[Span]
    """In their order."""
    left_out: Sequence[str] = ()
    """Lines that are no records, with the reason."""

    @property
    def seconds(self) -> Seconds:
        """Seconds by class since the first start; they add up to ``wall_s``."""
        every = [self.between, *(start.seconds for start in self.starts)]
        return {name: sum(seconds[name] for seconds in every) for name in CLASSES}

    @property
    def wall_s(self) -> float:
        """Seconds from the begin of the first start to the last record."""
        return self.starts[-1].ended - self.starts[0].began

    @property
    def steps_kept(self) -> int:
        """Steps that were neither taken again nor undone, including those that were skipped."""
        return sum(start.steps_kept for start in self.starts)

    @property
    def steps_lost(self) -> int:
        """Steps that were taken again, or undone."""
        return sum(start.steps_lost for start in self.starts)

    @property
    def images_kept(self) -> int:
        """Samples of the steps kept, over all ranks."""
        return sum(start.steps_kept * start.samples for start in self.starts)

    @property
    def gpu_hours(self) -> float:
        """Hours times ranks, while a start held its nodes."""
        return sum(start.gpu_hours for start in self.starts)

    @property
    def goodput(self) -> float:
        """Share of the time since the first start that went into steps kept."""
        return self.seconds["step kept"] / self.wall_s if self.wall_s else 0.0

    @property
    def watts(self) -> float | None:
        """Mean measured power of a GPU; None: not measured."""
        measured_s = sum(start.measured_s for start in self.starts)
        return sum(start.joules for start in self.starts) / measured_s if measured_s else None


def read_ledger(run: Path) -> Sums:
    """Read the ledger of a run; lines that are no records are left out, and their time is ``unknown``.

    Raises:
        ConfigError: there is no ledger, or no start in it.
        OSError: it cannot be read.
    """
    reading = _Reading()
    with suppress(FileNotFoundError), open_lines(run / FILE) as file:
        for number, line in enumerate(whole_lines(file), 1):
            reading.take_line(number, line)
    if not reading.starts:
        raise ConfigError(f"{run}: no {FILE} with a start; earlier versions wrote none: it begins with the next start")
    return reading.sums()


@dataclass(slots=True)
class _Piece:
    """Time of successive steps that are kept so far."""

    start: Start
    first: int
    last: int
    parts: list[tuple[Seconds, float]]
    """Seconds, each with the sums of the span in which they were spent."""

    def spend(self, name: Class, share: float = 1.0) -> None:
        """Give a share of the time its class."""
        for span, seconds in self.parts:
            self.start.seconds[name] += seconds * share
            span[name] = span.get(name, 0.0) + seconds * share


class _Reading:
    """Records in their order. The pieces of kept steps are a stack, ascending: a loss takes from its end."""

    def __init__(self) -> None:
        self.starts: list[Start] = []
        self._between: Seconds = dict.fromkeys(CLASSES, 0.0)
        self._pieces: list[_Piece] = []
        self._spans: list[Span] = []
        self._open: Seconds = {}
        """Sums of the span that begins at the cursor."""
        self._cursor = 0.0
        """Time up to which every second has its class."""
        self._step = 0
        self._left_out: list[str] = []

    def take_line(self, number: int, line: bytes) -> None:
        """Take the record of a line, or note why it has none; a last line without its end is still being written."""
        record = record_of(line)
        why = why_no_record(line) if record is None else "" if self.take(record) else "no record of a ledger"
        if why and line.endswith(b"\n") and line.strip():
            self._left_out.append(f"line {number:,}: {why}")

    def take(self, record: Record) -> bool:
        """Take the next record and return True; False: it lacks a field, as after a fault of the disk, and is left out.

        Each kind is read whole before it changes a sum, so that one that is left out has left nothing behind.
        """
        event = record.get("event")
        take = {
            "start": self._take_start,
            "resume": self._take_resume,
            "time": self._take_time,
            "rewind": self._take_rewind,
            "end": self._take_end,
        }.get(event if isinstance(event, str) and (self.starts or event == "start") else "")
        if take is not None:
            with suppress(LookupError, TypeError, ValueError, OverflowError):
                take(_Fields(record))
                return True
        return False

    def sums(self) -> Sums:
        """Return the sums of all records."""
        for piece in self._pieces:
            piece.spend("step kept")
            piece.start.steps_kept += piece.last - piece.first
        return Sums(self.starts, self._between, self._spans, self._left_out)

    def _take_start(self, record: _Fields) -> None:
        began, samples = record.number("began"), int(record.number("samples"))
        submitted, job_start = (record.optional(name) for name in ("submitted", "job_start"))
        held = began if job_start is None else min(job_start, began)
        nodes = [escape(str(node)) for node in record.of("nodes", list)]
        if self.starts:
            if not self.starts[-1].outcome and "logged" in record:
                step, at = (_bounded(value) for value in record.of("logged", list))
                self._take_last_line(int(step), min(at, began))
            self._fill_between(held, submitted)
            self.starts[-1].outcome = self.starts[-1].outcome or "killed"
        self._cursor = max(held, self._cursor)
        self.starts.append(Start(self._cursor, nodes, samples, ended=self._cursor))
        self._spend("start", began)

    def _take_last_line(self, step: int, at: float) -> None:
        """Add the steps that a killed trainer logged after its last record here."""
        if step > self._step and at > self._cursor:
            self._add_steps(step, at - self._cursor)
            self._move_to(at)

    def _fill_between(self, held: float, submitted: float | None) -> None:
        """Classify the time from the last record until nodes are held again: stop (after a kill: unknown), queue."""
        submitted = held if submitted is None else min(submitted, held)
        before: Class = "stop" if self.starts[-1].outcome else "unknown"
        spans: list[tuple[Class, float]] = [(before, submitted), ("queue", held)]
        for name, until in spans:
            seconds = max(0.0, until - self._cursor)
            self._between[name] += seconds
            self._open[name] = seconds
            self._close_span(until)

    def _take_resume(self, record: _Fields) -> None:
        self._lose_after(record.step)
        self._step = self.starts[-1].resumed = record.step

    def _take_rewind(self, record: _Fields) -> None:
        to, step = int(record.number("to")), record.step
        self._lose_after(to)
        self._step = step

    def _take_time(self, record: _Fields) -> None:
        start, began, ended = self.starts[-1], record.number("from"), record.number("at")
        spent = {name: record.inner("seconds").number(name) for name in record.of("seconds", dict)}
        if min(spent.values(), default=0.0) < 0:
            raise ValueError("seconds")
        step, watts = record.step, record.optional("watts")
        slowest = _slowest(record, start)
        self._spend("unknown", began)  # until then: a damaged line
        # What is left of the record: its own seconds are rounded, and a clock that is set back between two starts lets
        # them overlap. No second counts twice.
        wall_s, told_s = max(0.0, ended - self._cursor), sum(spent.values())
        for name, seconds in spent.items():
            seconds *= wall_s / told_s if told_s else 0.0
            if name == "step":
                self._add_steps(step, seconds)
            else:
                self._give(_CLASS_OF.get(name, "unknown"), seconds)
        if not told_s:
            self._spend("unknown", ended)
        self._move_to(ended)
        if slowest is not None:
            rank, late_s, others_s = slowest
            start.late_s[rank] = start.late_s.get(rank, 0.0) + late_s
            start.others_s += others_s
        if watts is not None:
            start.joules += watts * wall_s
            start.measured_s += wall_s

    def _take_end(self, record: _Fields) -> None:
        start, at = self.starts[-1], record.number("at")
        message = escape(record.of("message", str)) if "message" in record else ""
        if "code" not in record:
            start.message = message
            start.outcome = escape(str(record["outcome"]))
            self._spend("stop", at)
            return
        code, step, phase, beat = int(record.number("code")), record.step, record["phase"], record.number("beat")
        if message and (not start.message or start.message not in message):  # else the trainer's has fewer words
            start.message = message.removeprefix("fastdiff: ")
        if not start.outcome:  # killed: the trainer wrote no end
            self._take_last_beat(step, phase, beat)
            start.outcome = "done" if code == 0 else "asked to stop" if code == 75 else f"exit code {code}"
        if "micro" in record:  # of another rank; this one may have lost the connection to it
            start.outcome = OUT_OF_MEMORY
        self._spend("unknown" if code == _UNAVAILABLE or code >= _SIGNALLED else "stop", at)

    def _take_last_beat(self, step: int, phase: object, beat: float) -> None:
        """Classify the time from the last record of a killed trainer to its last heartbeat."""
        step += phase == "callbacks"  # the step before them has been taken
        seconds = max(0.0, beat - self._cursor)
        if step > self._step:
            self._add_steps(step, seconds)
            self._move_to(beat)
        else:
            in_a_step = phase in ("data", "forward", "backward", "step")
            self._spend("step lost" if in_a_step else "start" if phase == "start" else "unknown", beat)

    def _add_steps(self, last: int, seconds: float) -> None:
        """Add the time of the steps up to ``last``; without any, it belongs to those before, if there are."""
        start = self.starts[-1]
        if last > self._step:
            self._pieces.append(_Piece(start, self._step, last, [(self._open, seconds)]))
            self._step = last
        elif self._pieces and self._pieces[-1].start is start:
            self._pieces[-1].parts.append((self._open, seconds))
        else:
            self._give("step lost", seconds)

    def _give(self, name: Class, seconds: float) -> None:
        self.starts[-1].seconds[name] += seconds
        self._open[name] = self._open.get(name, 0.0) + seconds

    def _spend(self, name: Class, until: float) -> None:
        self._give(name, max(0.0, until - self._cursor))
        self._move_to(until)

    def _move_to(self, time: float) -> None:
        self._close_span(time)
        self.starts[-1].ended = self._cursor

    def _close_span(self, time: float) -> None:
        if time > self._cursor:
            self._spans.append(Span(len(self.starts) - 1, self._cursor, time, self._step, self._open))
            self._cursor, self._open = time, {}

    def _lose_after(self, step: int) -> None:
        while self._pieces and self._pieces[-1].last > step:
            piece = self._pieces.pop()
            kept, steps = max(0, step - piece.first), piece.last - piece.first
            if kept:
                parts = [(span, seconds * kept / steps) for span, seconds in piece.parts]
                self._pieces.append(_Piece(piece.start, piece.first, step, parts))
            piece.spend("step lost", (steps - kept) / steps)
            piece.start.steps_lost += steps - kept


class _Fields:
    """Fields of a record of foreign origin, checked for their types."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def __contains__(self, name: str) -> bool:
        return self._record.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        return self._record[name]

    @property
    def step(self) -> int:
        """Steps taken."""
        return int(self.number("step"))

    def of(self, name: str, kind: type) -> Any:
        """Return a field of this type; raise TypeError if it has another one."""
        if not isinstance(found := self._record[name], kind):
            raise TypeError(name)
        return found

    def inner(self, name: str) -> _Fields:
        """Return the fields of an object."""
        return _Fields(self.of(name, dict))

    def number(self, name: str) -> float:
        """Return a number; raise KeyError, TypeError or ValueError if it is none."""
        return _bounded(self._record[name])

    def optional(self, name: str) -> float | None:
        """Return a number, or None without one."""
        return self.number(name) if name in self else None


def _bounded(value: Any) -> float:
    """Return a number with which sums stay finite; raise TypeError, OverflowError or ValueError if it is none."""
    if not -1e12 < (found := float(value)) < 1e12:
        raise ValueError("a number beyond all bounds")
    return found


def _slowest(record: _Fields, start: Start) -> tuple[int, float, float] | None:
    """Return the slowest rank of a record of the time, its seconds and those of the others; None without one."""
    if "slowest" not in record:
        return None
    slowest = record.inner("slowest")
    rank, late_s, others_s = (slowest.number(name) for name in ("rank", "late_s", "others_s"))
    return range(len(start.nodes))[int(rank)], late_s, others_s
