"""Format of ``ledger.jsonl``: records that are appended through every start of a run, and never removed.

Every record has its ``event``, the wall-clock time ``at`` in seconds since 1970, and the ``step`` that was reached:

- ``start``: rank 0 owns the folder. ``began``: start of the supervisor or, without one, of the process. ``nodes``: host
  of each rank; ``samples`` of a step; ``submitted`` and ``job_start``: times of the Slurm job, if there is one;
  ``logged``: step and time of the last line of ``metrics.jsonl``, for a kill without a supervisor.
- ``resume``: the run continues from ``step``; all later ones so far are lost.
- ``time``: where the ``seconds`` from ``from`` to ``at`` went, by ``Account``; they add up to ``at - from``.
  ``slowest``: the rank that was last to end its forward passes, if there are several. ``watts``: mean over the GPUs.
  ``processor_s`` behind the rehearsal, whose seconds are those of ``compile``: its processor time.
- ``rewind``: the steps after ``to`` are lost; the run continues behind ``step``.
- ``end``, by the trainer: it has closed the run; ``outcome``. By the supervisor: all ranks are gone; exit ``code``, and
  ``beat`` and ``phase`` of the last heartbeat of rank 0, whose ``step`` it is; ``micro``: the smaller micro-batch with
  which it starts the ranks again after a lack of memory. By both after an error: ``message``, its text without secrets.
"""

import os
import time
from pathlib import Path
from typing import Literal

from fastdiff.json_lines import JsonLines

FILE = "ledger.jsonl"
"""Name in the run folder."""
STARTED = "FASTDIFF_STARTED"
"""Environment variable: time at which the supervisor, or the trainer's process, began."""
SUBMITTED = "FASTDIFF_SUBMITTED"
"""Environment variable of a Slurm job: local time of its submission or last requeue, as squeue writes it."""
JOB_START = "SLURM_JOB_START_TIME"
OUT_OF_MEMORY = "out of memory"
"""Outcome of a start that another one follows with a smaller micro-batch."""

Account = Literal["start", "compile", "data wait", "step", "validation", "sampling", "save", "rewind", "stop"]
"""What the trainer does; the reader divides ``step`` into kept and lost."""


def open_ledger(run: Path) -> JsonLines:
    """Return the ledger of a run, to append to; a line that a kill has cut off is ended.

    Whatever keeps a record from being written, such as a full disk, is a warning: the record waits in memory.
    """
    path = run / FILE
    lines = JsonLines(path, buffered=True)
    if not _ends_whole(path):
        lines.append(b"\n")
    return lines


def _ends_whole(path: Path) -> bool:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
    except OSError:  # there is none, or it is empty
        return True


def process_began() -> float:
    """Return the wall-clock time at which this process began, to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
