"""How a run ended, in one line that is the same on every node."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fastdiff.cluster.supervisor.ranks import STOPPED_STATES, Sight
from fastdiff.errors import Preempted, is_lost_connection
from fastdiff.parallel.heartbeat import STACKS

UNAVAILABLE = 69
"""Exit code: a rank or a node stopped answering (EX_UNAVAILABLE of sysexits.h)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run."""

    exit_code: int
    line: str
    """For people; empty: all went well."""
    abrupt: bool = False
    """The ranks that still run cannot end by themselves."""
    consequence: bool = False
    """Of the end of someone else, as it seems: whoever is not there then failed first."""

    def to_json(self) -> str:
        """For ``from_json``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """From ``to_json``."""
        return cls(**json.loads(text))


def of_failed_rank(rank: int, process: int, node: str, code: int, error: Path) -> Outcome:
    """A rank ended badly.

    Args:
        rank: which.
        process: its number.
        node: its node, in words.
        code: its exit code, or minus the signal that killed it.
        error: the file in which it left the cause (``heartbeat.note_failure``), if it could.
    """
    who = f"fastdiff: rank {rank} ({node}, process {process}) failed first"
    if code < 0:
        return Outcome(128 - code, f"{who}: killed by {_signal_name(-code)}")
    try:
        message = " ".join(str(json.loads(error.read_text())["message"]).split())
    except (OSError, ValueError, KeyError):
        message = "what it printed stands above"
    return Outcome(code, f"{who}: exit code {code}: {message}", consequence=is_lost_connection(message))


def of_hang(
    sights: Mapping[str, Iterable[Sight]], mute_nodes: Iterable[str], hang_timeout_s: float, run: Path
) -> Outcome:
    """No progress for so long.

    Args:
        sights: of each node, in words, its ranks.
        mute_nodes: nodes that do not answer even now.
        hang_timeout_s: no beat for so long is a hang.
        run: the run folder.
    """
    for node in mute_nodes:
        return Outcome(UNAVAILABLE, f"fastdiff: {node} failed first: it does not answer", abrupt=True)
    everyone = [(sight, node) for node, found in sights.items() for sight in found]
    if not everyone:
        return Outcome(UNAVAILABLE, "fastdiff: the run hangs, and no rank is left", abrupt=True)
    sight, node = min(everyone, key=lambda pair: pair[0].place)
    where = f"in {sight.phase} after step {sight.step}" if sight.step >= 0 else "before its first beat"
    what = "stopped from outside" if sight.state in STOPPED_STATES else f"hanging (state {sight.state})"
    line = (
        f"fastdiff: rank {sight.rank} ({node}, process {sight.process}) failed first: {what}, no sign of life for "
        f"{sight.age_s:.0f} s (--hang-timeout {hang_timeout_s:g}), {where}; "
        f"the stacks of the ranks are in {run / STACKS}"
    )
    return Outcome(UNAVAILABLE, line, abrupt=True)


def of_lost_node(node: str, silent_s: float) -> Outcome:
    """A node is gone."""
    line = f"fastdiff: {node} failed first: no contact for {silent_s:.0f} s (is it down, or the network between?)"
    return Outcome(UNAVAILABLE, line, abrupt=True)


def of_ends(exit_codes: Iterable[int]) -> Outcome:
    """All ranks ended well: 0, or 75 if they were asked to stop."""
    if Preempted.exit_code in set(exit_codes):
        line = "fastdiff: stopped as asked; the same command goes on"
        return Outcome(Preempted.exit_code, f"{line} (exit code {Preempted.exit_code})")
    return Outcome(0, "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
