"""The loop that watches the ranks of one node until the run has ended on all nodes."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastdiff.cluster.supervisor.nodes import Nodes
from fastdiff.cluster.supervisor.outcome import (
    UNAVAILABLE,
    Outcome,
    lacked_memory,
    of_ends,
    of_failed_rank,
    of_lost_node,
)
from fastdiff.cluster.supervisor.ranks import Rank, Ranks
from fastdiff.cluster.supervisor.signals import STOP, Signals
from fastdiff.console import log, write_line
from fastdiff.errors import Preempted
from fastdiff.parallel.preemption import INTERRUPTED, INTERRUPTED_FILE, INTERRUPTED_LINE, STOPPING_LINE

_TICK_S = 0.5
_GRACE_S = 2.0
"""Time between the first failure and the kill, for the other ranks to print their own errors."""
_STOP_S = 60.0
"""Time between the first and the last rank to save and stop: all save the same step."""
_DUMP_S = 3.0
"""Time to write the stacks and NCCL's records."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds."""

    hang_s: float
    """Time to the next beat of a rank."""
    start_s: float
    """Time to the first batch of a rank."""
    contact_s: float
    """Time to the next heartbeat of a node."""


class Watch:
    """The watch of one node."""

    def __init__(
        self,
        ranks: Ranks,
        nodes: Nodes,
        signals: Signals,
        limits: Limits,
        *,
        folder: Path,
        name: str,
        master: str,
        request_dumps: Callable[[], None],
    ) -> None:
        self._ranks, self._nodes, self._signals, self._limits = ranks, nodes, signals, limits
        self._folder, self._name, self._master, self._request_dumps = folder, name, master, request_dumps
        self._gave_up = False
        """True once a rank ended without saving after a request to stop, because it made no progress."""
        self._codes: list[int] = []
        self._failure: Outcome | None = None
        self.stopping = False
        """True after a request to stop."""
        self._interrupts = 0
        self._stopped_s = self._lost_s = self._failed_s = self._dumped_s = float("inf")
        self._overdue = self._finished = False

    def until_end(self) -> Outcome:
        """Watch until the run has ended, end all ranks of this node and return the outcome."""
        while True:
            for number in self._signals.take(_TICK_S):
                self._on_signal(number)
            for rank, code in self._ranks.reap():
                self._on_end(rank, code)
            self._finish_if_done()
            outcome = self._nodes.outcome or self._outcome_without_contact()
            if outcome is not None:
                self._end_ranks(outcome)
                return outcome
            self._check_stop()
            self._check_hang()

    def _on_signal(self, number: int) -> None:
        """Forward a stop signal to all ranks, which save and stop; a second Ctrl-C ends them at once."""
        if number not in STOP:
            return
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts == 1:
            write_line(STOPPING_LINE)
            with suppress(OSError):
                (self._folder / INTERRUPTED_FILE).touch()
        if self._interrupts > 1:
            self._nodes.propose(Outcome(INTERRUPTED, INTERRUPTED_LINE, abrupt=True))
        self._stop(number if number in (signal.SIGTERM, signal.SIGUSR1) else signal.SIGTERM)

    def _stop(self, number: int) -> None:
        self.stopping = True
        self._ranks.signal(number)

    def _on_end(self, rank: Rank, code: int) -> None:
        if self._restarts():  # a rank noted that before any other could notice: whatever ends now follows from it
            self._codes.append(code)
            return
        error = self._error_of(rank)
        if self.stopping and -code in (signal.SIGTERM, signal.SIGUSR1):
            # The rank had no handler: not yet, with nothing to save, or no longer, after a failure.
            code = 1 if error.exists() else Preempted.exit_code
        if Preempted.exit_code in self._codes and code and not self._ranks.training:
            code = Preempted.exit_code  # its failure follows from a rank that stopped before the first step
        has_stopped = code == Preempted.exit_code
        self._gave_up |= has_stopped and error.exists()
        self._codes.append(code)
        if has_stopped and self._stopped_s == float("inf"):
            self._stopped_s = time.monotonic()
            self._stop(signal.SIGTERM)
        elif code and not has_stopped and self._failure is None:
            self._fail(self._first_failure(rank, code))

    def _restarts(self) -> bool:
        """Propose to start the ranks again if one of them has noted a lack of memory; return whether one has."""
        lacking = next((rank for rank in self._ranks.every if lacked_memory(self._error_of(rank))), None)
        if lacking is not None and self._failure is None:
            self._fail(self._failure_of(lacking, Preempted.exit_code))
        return lacking is not None

    def _fail(self, failure: Outcome) -> None:
        self._failed_s, self._failure = time.monotonic(), failure
        self._nodes.propose(failure)

    def _first_failure(self, ended: Rank, code: int) -> Outcome:
        """Return the failure of the rank that ended first, or of the one that it let print its message before."""
        told = self._ranks.told
        if told is not None and code > 0:
            failure = self._failure_of(told, code)
            if not failure.consequence:
                return failure
        return self._failure_of(ended, code)

    def _failure_of(self, rank: Rank, code: int) -> Outcome:
        return of_failed_rank(rank.number, rank.process.pid, self._name, code, self._error_of(rank))

    def _error_of(self, rank: Rank) -> Path:
        return self._folder / f"rank-{rank.number:05d}.error"

    def _finish_if_done(self) -> None:
        if not (self._ranks.alive or self._failure or self._finished):
            self._finished = True
            self._nodes.finish(max(self._codes))

    def _outcome_without_contact(self) -> Outcome | None:
        """Ask the ranks to save once node 0 does not answer; they can if only its supervisor ended, not its ranks."""
        silent_s = self._nodes.silent_s
        if not self._nodes.broken and silent_s < self._limits.contact_s:
            return None
        if self._lost_s == float("inf"):
            self._lost_s = time.monotonic()
            self._stop(signal.SIGTERM)
        if self._finished and not self._gave_up:
            return of_ends(self._codes)
        if self._failure is not None and self._failed_s < self._lost_s and not self._failure.consequence:
            return self._failure
        if self._failure is not None or self._finished or time.monotonic() - self._lost_s > self._limits.contact_s:
            return of_lost_node(f"node 0 ({self._master}), seen from {self._name},", silent_s)
        return None

    def _check_stop(self) -> None:
        left = self._ranks.alive
        if left and time.monotonic() - self._stopped_s > _STOP_S:
            self._stopped_s = float("inf")
            line = (
                f"fastdiff: rank {left[0].number} ({self._name}, process {left[0].process.pid}) failed first: "
                f"it still ran {_STOP_S:.0f} s after another rank had saved and stopped"
            )
            self._nodes.propose(Outcome(UNAVAILABLE, line, abrupt=True))

    def _check_hang(self) -> None:
        """Announce a hang after two overdue readings: a beat can be read while it is written."""
        if self._nodes.hang and self._dumped_s == float("inf"):
            self._restarts()  # before the report: another node may have told first that its ranks wait
            statuses = self._ranks.statuses()
            self._dump()
            self._nodes.report(statuses)
        overdue = self._ranks.silent_for_s() > self._limits.hang_s
        overdue |= self._ranks.starting_for_s() > self._limits.start_s
        if overdue and self._overdue and not self._nodes.hang and not self._restarts():
            self._nodes.announce_hang()
        self._overdue = overdue

    def _dump(self) -> None:
        self._dumped_s = time.monotonic()
        self._ranks.dump_stacks()
        self._request_dumps()

    def _end_ranks(self, outcome: Outcome) -> None:
        if outcome.exit_code == Preempted.exit_code and outcome.micro is None:
            self._stop(signal.SIGTERM)  # another node was stopped before its ranks started
        if outcome.exit_code == UNAVAILABLE and self._ranks.alive and self._dumped_s == float("inf"):
            self._dump()
        now = time.monotonic()
        deadline = self._dumped_s + _DUMP_S if self._dumped_s <= now else now + (0 if outcome.abrupt else _GRACE_S)
        while self._ranks.alive and time.monotonic() < deadline:
            for number in self._signals.take(deadline - time.monotonic()):
                self._on_signal(number)  # a request to stop, which the next start of the ranks heeds
            list(self._ranks.reap())
        for rank in self._ranks.kill():
            log.error(
                f"rank {rank.number} ({self._name}, process {rank.process.pid}) cannot be killed: it waits "
                "in the kernel for a device or storage, and may hold its GPU until the node is rebooted"
            )
