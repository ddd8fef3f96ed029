"""That a rank is alive, and where it is, for whoever watches it.

Under a supervisor (``fastdiff.cluster``) a rank writes its step and phase into shared memory: the supervisor sees who
hangs. It also watches itself: a thread in C, which needs neither the interpreter's lock nor a signal, writes the stacks
of all threads and ends the process when no beat has come for the hang time-out (under a supervisor, twice as long).
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Phase = Literal["start", "data", "forward", "backward", "step", "callbacks", "end"]
PHASES: tuple[Phase, ...] = ("start", "data", "forward", "backward", "step", "callbacks", "end")
"""In the order in which a step passes them."""

NODE_FOLDER = "FASTDIFF_NODE_FOLDER"
"""Environment variable: the supervisor's private folder on this node."""
STACKS = "stacks"
"""Folder in the run folder: one file per rank with the stacks of a hang."""

START_TIMEOUT_S = 600.0
"""At least so long may a start take, which reads whole files and compiles."""

_BEAT = struct.Struct("<qqd")


@dataclass(frozen=True, slots=True)
class Beat:
    """The last sign of life of a rank."""

    step: int
    """Optimizer steps it had taken."""
    phase: Phase
    """What it began."""
    monotonic_s: float
    """When, on the node's monotonic clock."""


def beat_path(node_folder: Path, rank: int) -> Path:
    """Where a rank's beats are."""
    return node_folder / f"rank-{rank:05d}.beat"


def read_beat(path: Path) -> Beat | None:
    """Return the last beat in a file; None before the first."""
    try:
        step, phase, at = _BEAT.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return Beat(step, PHASES[phase], at) if at else None


def stacks_path(run: Path, rank: int) -> Path:
    """Where a rank's stacks are written."""
    return run / STACKS / f"rank-{rank:05d}.txt"


def note_failure(exit_code: int, message: str) -> None:
    """Leave the cause of this rank's end for the supervisor; without one, do nothing."""
    folder = os.environ.get(NODE_FOLDER)
    if folder:
        path = Path(folder) / f"rank-{int(os.environ.get('RANK', '0')):05d}.error"
        with suppress(OSError):
            path.write_text(json.dumps({"exit_code": exit_code, "message": message}))


class Heartbeat:
    """The heart of one rank.

    Args:
        run: the run folder.
        rank: of this process.
        hang_timeout_s: without a beat for so long, the rank counts as hanging; 0: it is not watched.
    """

    def __init__(self, run: Path, rank: int, hang_timeout_s: float) -> None:
        node_folder = os.environ.get(NODE_FOLDER)
        self._path = stacks_path(run, rank)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = self._path.open("w")
        # A supervisor knows more; it goes first, but it may be gone.
        self._timeout_s = hang_timeout_s * (2 if node_folder else 1)
        self._write: Callable[[bytes], None] | None = None
        self._last: tuple[int, Phase] = (0, "start")
        self.at_s = 0.0
        """When it last beat, on the monotonic clock."""
        faulthandler.register(signal.SIGUSR2, self._stacks, all_threads=True)
        if node_folder:
            (Path(node_folder) / "run").write_text(str(run.absolute()))
            self._write = _shared(beat_path(Path(node_folder), rank))
        self.beat(0, "start")

    def beat(self, step: int, phase: Phase) -> None:
        """Tell that this rank, having taken ``step`` steps, begins ``phase``."""
        self._last, self.at_s = (step, phase), time.monotonic()
        if self._write is not None:
            self._write(_BEAT.pack(step, PHASES.index(phase), self.at_s))
        if self._timeout_s > 0 and phase in ("start", "data", "callbacks", "end"):  # it starts a thread: not always
            timeout_s = max(START_TIMEOUT_S, self._timeout_s) if phase == "start" else self._timeout_s
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=self._stacks)

    def enter(self, phase: Phase) -> None:
        """Tell that this rank begins ``phase`` of the same step."""
        self.beat(self._last[0], phase)

    def again(self) -> None:
        """Tell that this rank is still at what it began, and not hanging."""
        self.beat(*self._last)

    def close(self) -> None:
        """Stop watching; the file of stacks goes if none were written."""
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a supervisor may ask once more
        self._stacks.close()
        with suppress(OSError):
            if not self._path.stat().st_size:
                self._path.unlink()
                self._path.parent.rmdir()  # fails while another rank's file is there


def _shared(path: Path) -> Callable[[bytes], None]:
    path.write_bytes(bytes(_BEAT.size))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), _BEAT.size)

    def write(beat: bytes) -> None:
        memory[:] = beat

    return write
