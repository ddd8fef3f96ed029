"""Account that a rank keeps of its time; that of rank 0 is written to the ledger."""

import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import Self

from fastdiff import sanitize
from fastdiff.errors import OutOfMemoryRestart, Preempted
from fastdiff.json_lines import JsonLines, Record
from fastdiff.ledger.records import JOB_START, OUT_OF_MEMORY, STARTED, SUBMITTED, Account

_EVERY_S = 5.0
"""Least seconds between records of the time, which are written after a step."""
_EVERY_SHARE = 1e-3
"""Time between these records as a share of the time since the start: months make thousands of records, not millions."""


class Ledger:
    """Account of the time of this process; one of the accounts is open at any time, at first ``start``.

    It is a context manager, which ends it. The clock is that of the host and never waits for the device: what that
    still does when the host goes on belongs to the account that waits for it next.

    Args:
        lines: the file, of rank 0; None: nothing is written.
        nodes: host of each rank.
        samples: of an optimizer step.
        logged: step and time of the last line that the run has logged so far.
    """

    def __init__(
        self, lines: JsonLines | None, nodes: Sequence[str], samples: int, logged: tuple[int, float] | None = None
    ) -> None:
        self._lines = lines
        self._offset = time.time() - time.perf_counter()  # so that a clock that is set moves no interval
        began = _number(os.environ.pop(STARTED, "")) or self._now()
        self._account: Account = "start"
        self._began = self._since = self._written = min(began, self._now())
        self._seconds: dict[Account, float] = defaultdict(float)
        self._written_s: dict[Account, float] = {}
        self._step = 0
        self._own_s = [0.0] * len(nodes)
        self._watts: list[float] = []
        self._write(
            "start",
            began=self._written,
            nodes=list(nodes),
            samples=samples,
            submitted=_local_time(os.environ.get(SUBMITTED, "")),
            job_start=_number(os.environ.get(JOB_START, "")) or None,  # 0: not known
            logged=logged,
        )

    def enter(self, account: Account) -> Account:
        """Close the open account, open this one, and return the closed one."""
        now, before = self._now(), self._account
        self._seconds[before] += now - self._since
        self._since, self._account = now, account
        return before

    @contextmanager
    def account(self, account: Account) -> Iterator[None]:
        """Open an account for the enclosed time."""
        before = self.enter(account)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Open the account of the steps for the enclosed time, and then that of the stop."""
        self.enter("step")
        try:
            yield
        finally:
            self.enter("stop")

    def resume(self, step: int) -> None:
        """Record the step from which the run continues."""
        self._step = step
        self._write("resume")

    def step_taken(self, step: int) -> None:
        """Note that ``step`` optimizer steps have been taken."""
        self._step = step

    def write_when_due(self) -> None:
        """Write the time so far, every few seconds; in a long run less often."""
        now = self._now()
        if now - self._written > max(_EVERY_S, _EVERY_SHARE * (now - self._began)):
            self._write_time()

    def note_ranks(self, own_s: Sequence[float], watts: float | None) -> None:
        """Record what the ranks told in an exchange that they make anyway.

        Args:
            own_s: seconds of each rank's own work in the steps since the last call (``parallel.compute_time``).
            watts: mean power of a GPU; None: not measured.
        """
        self._own_s = [total + new for total, new in zip(self._own_s, own_s, strict=True)]
        if watts is not None:
            self._watts.append(watts)

    def totals(self) -> dict[Account, float]:
        """Return the seconds by account since the start."""
        self.enter(self._account)
        accounts = (*self._written_s, *self._seconds)
        return {name: self._written_s.get(name, 0.0) + self._seconds.get(name, 0.0) for name in accounts}

    def rewind(self, step: int, to: int) -> None:
        """Record that the steps after ``to`` are undone, and that the run continues behind ``step``."""
        self._step = step
        self._write_time()
        self._write("rewind", to=to)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write_time()
        told = {} if error is None or isinstance(error, Preempted) else {"message": message_of(str(error))}
        self._write("end", outcome=_outcome(kind), **told)
        if self._lines is not None:
            self._lines.close()

    def _now(self) -> float:
        return self._offset + time.perf_counter()

    def rehearsed(self, processor_s: float) -> None:
        """Write the time so far, which ends with the rehearsal, and the processor time of that."""
        self._write_time(processor_s=round(processor_s, 6))

    def _write_time(self, **more: float) -> None:
        self._written_s = self.totals()  # reads the clock, once: the seconds and their end belong together
        seconds = {name: round(spent, 6) for name, spent in self._seconds.items()}
        before, self._written = self._written, self._since
        self._write("time", **{"from": before, "seconds": seconds, **self._ranks(), **more})
        self._seconds.clear()
        self._own_s, self._watts = [0.0] * len(self._own_s), []

    def _ranks(self) -> Record:
        """Return the slowest rank, by how many seconds the others waited for it, and the power, as far as known."""
        found: Record = {"watts": statistics.fmean(self._watts)} if self._watts else {}
        if len(self._own_s) > 1 and any(self._own_s):
            last = max(self._own_s)
            rank = self._own_s.index(last)
            others = statistics.median(self._own_s[:rank] + self._own_s[rank + 1 :])
            found["slowest"] = {"rank": rank, "late_s": round(last - others, 6), "others_s": round(others, 6)}
        return found

    def _write(self, event: str, **values: object) -> None:
        if self._lines is not None:
            at = self._written if event == "time" else self._now()
            self._lines.write({"event": event, "at": at, "step": self._step, **values})


def _outcome(kind: type[BaseException] | None) -> str:
    """Return the end of a start in words, by the type of its error."""
    if kind is None:
        return "done"
    words: dict[type[Exception], str] = {Preempted: "asked to stop", OutOfMemoryRestart: OUT_OF_MEMORY}
    return next((said for known, said in words.items() if issubclass(kind, known)), kind.__name__)


def message_of(text: str) -> str:
    """Return the text of an error as it is recorded: without secrets, and of a bounded length."""
    return sanitize.escape(" ".join(sanitize.message(text).split()))


def _number(text: str) -> float | None:
    try:
        return found if math.isfinite(found := float(text)) else None
    except ValueError:
        return None


def _local_time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
