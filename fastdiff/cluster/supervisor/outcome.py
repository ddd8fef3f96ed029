"""The outcome of a run: exit code and one line, equal on every node."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastdiff.cluster.supervisor.ranks import STOPPED_STATES, RankStatus
from fastdiff.errors import Preempted, is_lost_connection
from fastdiff.exit_message import message_file
from fastdiff.parallel.heartbeat import STACKS

UNAVAILABLE = 69
"""Exit code: a rank or a node stopped answering (EX_UNAVAILABLE of sysexits.h)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run."""

    exit_code: int
    line: str
    """Message for the user; empty after a success."""
    who: str = ""
    """The message without its cause, where the rank that failed has printed that; empty: it has printed none."""
    abrupt: bool = False
    """True if the ranks that still run cannot end by themselves."""
    micro: int | None = None
    """Micro-batch with which the ranks are to be started again, after a lack of memory; None: the run ends."""
    consequence: bool = False
    """True if another rank's end probably caused this one: then a missing node failed first."""

    def to_json(self) -> str:
        """Return the outcome as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """Return the outcome that ``to_json`` wrote."""
        return cls(**json.loads(text))


def of_failed_rank(rank: int, process: int, node: str, code: int, error: Path) -> Outcome:
    """Return the outcome after the failure of a rank.

    Args:
        rank: the rank.
        process: its process id.
        node: its node, for the message.
        code: its exit code, or minus the signal that killed it.
        error: file in which it recorded the cause (``heartbeat.note_failure``); may be missing.
    """
    who = f"fastdiff: rank {rank} ({node}, process {process}) failed first"
    if code < 0:
        return Outcome(128 - code, f"{who}: killed by {_signal_name(-code)}")
    noted = _noted(error)
    message = " ".join(str(noted.get("message", "see its output above")).split())
    who = f"{who}: exit code {code}"
    has_told = message_file(error.parent, rank).exists()
    return Outcome(
        code,
        f"{who}: {message}",
        who if has_told else "",
        micro=noted.get("micro"),
        consequence=is_lost_connection(message),
    )


def lacked_memory(error: Path) -> bool:
    """Return whether a rank whose cause of failure is in this file ended for a start with a smaller micro-batch."""
    return _noted(error).get("micro") is not None


def _noted(error: Path) -> dict[str, Any]:
    """Return the cause that a rank recorded (``heartbeat.note_failure``); empty without one."""
    try:
        return dict(json.loads(error.read_text()))
    except (OSError, ValueError):
        return {}


def of_hang(
    statuses: Mapping[str, Iterable[RankStatus]], silent_nodes: Iterable[str], hang_timeout_s: float, run: Path
) -> Outcome:
    """Return the outcome after a hang."""
    for node in silent_nodes:
        return Outcome(UNAVAILABLE, f"fastdiff: {node} failed first: it does not answer", abrupt=True)
    everyone = [(status, node) for node, found in statuses.items() for status in found]
    if not everyone:
        return Outcome(UNAVAILABLE, "fastdiff: the run hangs, and no rank is left", abrupt=True)
    status, node = min(everyone, key=lambda pair: pair[0].place)
    where = f"in {status.phase} after step {status.step}" if status.step >= 0 else "before its first beat"
    what = "stopped from outside" if status.state in STOPPED_STATES else f"hanging (state {status.state})"
    line = (
        f"fastdiff: rank {status.rank} ({node}, process {status.process}) failed first: {what}, no sign of life for "
        f"{status.age_s:.0f} s (--hang-timeout {hang_timeout_s:g}), {where}; "
        f"the stacks of the ranks are in {run / STACKS}"
    )
    return Outcome(UNAVAILABLE, line, abrupt=True)


def of_lost_node(node: str, silent_s: float) -> Outcome:
    """Return the outcome after the loss of a node."""
    line = f"fastdiff: {node} failed first: no contact for {silent_s:.0f} s (is it down, or the network between?)"
    return Outcome(UNAVAILABLE, line, abrupt=True)


def of_ends(exit_codes: Iterable[int]) -> Outcome:
    """Return the outcome without a failure: exit code 0, or 75 after a request to stop."""
    if Preempted.exit_code in set(exit_codes):
        line = "fastdiff: stopped as requested; the same command resumes the run"
        return Outcome(Preempted.exit_code, f"{line} (exit code {Preempted.exit_code})")
    return Outcome(0, "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
