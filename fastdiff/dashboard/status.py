"""State of a run in words: empty, starting, running, ended and how, killed, silent, deleted."""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastdiff.ledger.reader import Sums
from fastdiff.run_files import names_inside, read_inside

_CHECKPOINT = re.compile("step-[0-9]{8,}")
_HOLDER = re.compile(r"process (\d+) on (\S+)")
_WRITTEN = ("metrics.jsonl", "ledger.jsonl", ".lock")
_MOST_LOCK = 1000
_SILENT_S = 300.0
"""Age of the newest file of a run on another machine from which it counts as silent."""


@dataclass(frozen=True, slots=True)
class Status:
    """State of a run."""

    kind: str
    """``empty``, ``waiting``, ``running``, ``done``, ``stopped``, ``failed``, ``silent`` or ``gone``."""
    text: str
    message: str = ""
    """Of the error that ended it, if it is known."""


def pulse(run: Path) -> str:
    """Return what of the state of a run changes without its files: whether its process lives, or it is silent."""
    return f"{_lives(run / '.lock')} {_is_silent(run)}"


def status_of(run: Path, sums: Sums | None, has_records: bool, first_record: int | None) -> Status:
    """Return the state of a run.

    Args:
        run: its folder.
        sums: of its ledger, if it has one.
        has_records: whether its log has a line.
        first_record: step of the first line; None: not known yet.
    """
    if not os.path.isdir(run):
        return Status("gone", "the folder has been deleted")
    outcome = sums.starts[-1].outcome if sums is not None else ""
    lives = _lives(run / ".lock")
    if lives:
        return _running(has_records, first_record)
    if outcome:
        return _ended(run, outcome, sums.starts[-1].message if sums is not None else "")
    if lives is not None:
        return Status("failed", f"killed; the same command {_goes_on(run)}")
    if os.path.exists(run / ".lock") and not _is_silent(run):
        return _running(has_records, first_record)
    if not any(os.path.exists(run / name) for name in ("run.json", *_WRITTEN)):
        return Status("empty", "no run has begun in this folder")
    return Status("silent", "no sign of life: it was killed, hangs, or is a copy from another machine")


def _running(has_records: bool, first_record: int | None) -> Status:
    if has_records:
        return Status("running", "running")
    if first_record is None:
        return Status("waiting", "starting: it has not recorded its configuration yet")
    return Status("waiting", f"running; no record yet: the first comes after step {first_record:,}")


def _ended(run: Path, outcome: str, message: str) -> Status:
    if outcome == "done":
        return Status("done", "done")
    if outcome == "asked to stop":
        return Status("stopped", "stopped on request and saved; the same command resumes")
    mended = "once its cause is mended, " if message else ""
    return Status("failed", f"ended: {outcome}; {mended}the same command {_goes_on(run)}", message)


def _goes_on(run: Path) -> str:
    """Say how a run goes on: it has a checkpoint, or not yet."""
    try:
        has_one = any(_CHECKPOINT.fullmatch(name) for name in names_inside(run, "checkpoints"))
    except OSError:
        has_one = False
    return "resumes from the newest checkpoint" if has_one else "begins anew: there is no checkpoint yet"


def _lives(lock: Path) -> bool | None:
    """Return whether the process that claimed the folder still has its lock; None: it is another machine's, or unknown.

    The lock itself is not tried, because a start at the same moment would be refused; times are not compared, because
    those of files may be of the clock of another machine.
    """
    try:
        holder = _HOLDER.fullmatch(read_inside(lock.parent, lock.name, _MOST_LOCK).decode(errors="replace").strip())
        if holder is None or holder[2] != os.uname().nodename:
            return None
        return _has_open(int(holder[1]), lock.stat())
    except (OSError, ValueError):
        return None


def _has_open(process: int, file: os.stat_result) -> bool:
    """Return whether a process of this machine has a file open; PermissionError: it is another user's."""
    descriptors = Path(f"/proc/{process}/fd")
    try:
        found = list(descriptors.iterdir())
    except FileNotFoundError:
        return False
    for descriptor in found:
        with suppress(FileNotFoundError):  # closed meanwhile
            # Others are not asked for their status: they may lie on a file server that does not answer.
            if os.readlink(descriptor).endswith("/.lock") and os.path.samestat(descriptor.stat(), file):
                return True
    return False


def _is_silent(run: Path) -> bool:
    """Return whether nothing has been written for long: the only sign of a run on another machine."""
    return time.time() - max(_changed(run / name) for name in _WRITTEN) > _SILENT_S


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
