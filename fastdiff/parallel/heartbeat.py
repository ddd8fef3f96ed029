"""Heartbeat of a rank: its phase and its last progress.

Under a supervisor (``fastdiff.cluster``) a rank writes its step and phase into shared memory, so that the supervisor
finds the rank that hangs. A rank also watches itself: after the hang timeout without a beat (twice as long under a
supervisor) a thread writes the stacks of all threads, prints the error and ends the process. Should that thread not get
the GIL, a thread in C writes the stacks and ends the process, without a message.
"""

import faulthandler
import json
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from fastdiff.console import log
from fastdiff.errors import FastdiffError, report
from fastdiff.exit_message import NODE_FOLDER
from fastdiff.files import NO_SPACE

Phase = Literal["start", "data", "forward", "backward", "step", "callbacks", "end"]
PHASES: tuple[Phase, ...] = ("start", "data", "forward", "backward", "step", "callbacks", "end")
"""Phases in the order of a step."""

STACKS = "stacks"
"""Folder in the run folder: one file per rank with the stacks of a hang."""

START_TIMEOUT_S = 600.0
"""Lower limit of the timeout of the start, which reads whole files and compiles."""

MICRO_LIMIT = "FASTDIFF_MICRO_LIMIT"
"""Environment variable: the micro-batch with which the supervisor starts the ranks again (``note_failure``)."""

_CLAIMED = "run"
"""File in the supervisor's folder with the path of the run folder."""
_POLL_S = 1.0
_GIL_S = 5.0
"""Seconds after which the thread in C ends a rank whose Python thread could not."""

_BEAT = struct.Struct("<qqd")


class HangError(FastdiffError):
    """This rank made no progress within the hang timeout."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a rank."""

    step: int
    """Optimizer steps taken."""
    phase: Phase
    """The phase that began with this beat."""
    monotonic_s: float
    """Time of the beat on the node's monotonic clock."""


def beat_path(node_folder: Path, rank: int) -> Path:
    """Return the file of a rank's beats."""
    return node_folder / f"rank-{rank:05d}.beat"


def read_beat(path: Path) -> Beat | None:
    """Return the last beat in a file; None before the first."""
    try:
        step, phase, at = _BEAT.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return Beat(step, PHASES[phase], at) if at else None


def claimed_run(node_folder: Path) -> Path | None:
    """Return the run folder that the ranks of this node own; None: they have not come so far."""
    try:
        return Path((node_folder / _CLAIMED).read_text())
    except OSError:
        return None


def stacks_path(run: Path, rank: int) -> Path:
    """Return the file of a rank's stacks."""
    return run / STACKS / f"rank-{rank:05d}.txt"


def note_failure(exit_code: int, message: str, *, micro: int | None = None) -> None:
    """Record the cause of this rank's failure for the supervisor; a no-op without a supervisor.

    Args:
        exit_code: of this rank.
        message: the cause.
        micro: micro-batch with which the supervisor is to start the ranks again; None: the run ends.
    """
    folder = os.environ.get(NODE_FOLDER)
    if folder:
        path = Path(folder) / f"rank-{int(os.environ.get('RANK', '0')):05d}.error"
        beside = path.with_name(f"{path.name}.{threading.get_native_id()}")  # a hang is noted in a thread of its own
        with suppress(OSError):
            try:
                beside.write_text(json.dumps({"exit_code": exit_code, "message": message, "micro": micro}))
                os.link(beside, path)  # fails if it exists: what fails at the end of the rank follows from the first
            finally:
                beside.unlink(missing_ok=True)


class Heartbeat:
    """The heartbeat of this rank.

    Args:
        run: the run folder.
        rank: rank of this process.
        hang_timeout_s: seconds without a beat after which the rank counts as hanging; 0: it is not watched.
    """

    def __init__(self, run: Path, rank: int, hang_timeout_s: float) -> None:
        node_folder = os.environ.get(NODE_FOLDER)
        self._path = stacks_path(run, rank)
        self._stacks = _open_stacks(self._path)
        self._timeout_s = hang_timeout_s
        # The supervisor can name the rank that hangs, so it acts first; this timeout holds in case it is gone.
        self._factor = 2 if node_folder else 1
        self._write: Callable[[bytes], None] | None = None
        self._last: tuple[int, Phase] = (0, "start")
        self.at_s = 0.0
        """Time of the last beat on the monotonic clock."""
        self._due_s = float("inf")
        """Time at which the rank counts as hanging, on the monotonic clock."""
        self._closed = threading.Event()
        faulthandler.register(signal.SIGUSR2, self._stacks, all_threads=True)
        if node_folder:
            (Path(node_folder) / _CLAIMED).write_text(str(run.absolute()))
            self._write = _shared(beat_path(Path(node_folder), rank))
        self.beat(0, "start")
        if hang_timeout_s > 0:
            threading.Thread(target=self._watch, name="hang", daemon=True).start()

    @property
    def phase(self) -> Phase:
        """The phase of the last beat."""
        return self._last[1]

    def beat(self, step: int, phase: Phase) -> None:
        """Record that this rank begins ``phase`` after ``step`` optimizer steps."""
        self._last, self.at_s = (step, phase), time.monotonic()
        if self._write is not None:
            self._write(_BEAT.pack(step, PHASES.index(phase), self.at_s))
        if self._timeout_s > 0 and phase in ("start", "data", "callbacks", "end"):  # not in each: it starts a thread
            limit_s = max(START_TIMEOUT_S, self._timeout_s) if phase == "start" else self._timeout_s
            limit_s *= self._factor
            self._due_s = self.at_s + limit_s
            faulthandler.dump_traceback_later(limit_s + _GIL_S, exit=True, file=self._stacks)

    def enter(self, phase: Phase) -> None:
        """Record that this rank begins ``phase`` of the same step."""
        self.beat(self._last[0], phase)

    def again(self) -> None:
        """Renew the last beat: the rank is in the same phase and makes progress."""
        self.beat(*self._last)

    def _watch(self) -> None:
        """End this process at the hang timeout, with the stacks of its threads and one message per job."""
        while (left_s := self._due_s - time.monotonic()) > 0:
            if self._closed.wait(min(left_s, _POLL_S)):  # the next beat may bring a shorter timeout
                return
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        step, phase = self._last
        error = HangError(
            f"no progress for {time.monotonic() - self.at_s:.0f} s (--hang-timeout), in {phase} after step {step}; the "
            f"stacks of the threads are in {self._path.parent}; the same command resumes from the newest checkpoint"
        )
        note_failure(error.exit_code, str(error))
        os._exit(report(error))

    def close(self) -> None:
        """Stop watching and remove the file of stacks if it is empty."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the supervisor may request stacks once more
        self._stacks.close()
        with suppress(OSError):
            if not self._path.stat().st_size:
                self._path.unlink()
                self._path.parent.rmdir()  # fails while another rank's file exists


def _open_stacks(path: Path) -> TextIO:
    """Open the file of the stacks or, without room for it, another descriptor of standard error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "w", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        log.warning(f"{path}: {error.strerror}; the stacks of a hang would go to standard error")
        return os.fdopen(os.dup(2), "w")


def _shared(path: Path) -> Callable[[bytes], None]:
    path.write_bytes(bytes(_BEAT.size))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), _BEAT.size)

    def write(beat: bytes) -> None:
        memory[:] = beat

    return write
