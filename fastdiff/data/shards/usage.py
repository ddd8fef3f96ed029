"""Which runs use a data set: ``used_by.jsonl`` beside ``dataset.json``.

An encode of a changed source does not replace a data set that a run reads, or has used up to a checkpoint, because the
run could not go on with it. Only data sets that an encode could replace are noted. The note is a courtesy: where the
data cannot be written it is missing, and the resume of the run refuses the other data set by its digest.
"""

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path

from fastdiff.data.shards.format import ENCODE_PLAN
from fastdiff.files import read_bounded

USERS = "used_by.jsonl"
_MOST = 1 << 20


def note_use(data: Path, run: Path) -> None:
    """Note that a run uses a data set; nothing happens if it is noted, or the folder cannot be written."""
    line = json.dumps({"run": str(run.absolute())}) + "\n"
    with suppress(OSError, ValueError):
        if not (data / ENCODE_PLAN).exists():
            return
        if (data / USERS).exists() and line.encode() in read_bounded(data / USERS, _MOST).splitlines(keepends=True):
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(data / USERS, flags, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def runs_that_use(data: Path) -> list[Path]:
    """Return the run folders that use a data set: a process holds them, or they have a checkpoint."""
    runs = []
    with suppress(OSError, ValueError):
        for line in read_bounded(data / USERS, _MOST).splitlines():
            with suppress(ValueError, KeyError, TypeError):
                run = Path(json.loads(line)["run"])
                if run not in runs and (_has_checkpoint(run) or _is_held(run)):
                    runs.append(run)
    return runs


def _has_checkpoint(run: Path) -> bool:
    with suppress(OSError):
        return any(name.startswith("step-") for name in os.listdir(run / "checkpoints"))
    return False


def _is_held(run: Path) -> bool:
    with suppress(OSError):
        descriptor = os.open(run / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False
