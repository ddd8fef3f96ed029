"""The one message that the ranks of a job leave when they end, whichever of them is the fastest.

Launchers kill the other ranks as soon as they see that one has ended (DeepSpeed's, torchrun's, a supervisor), so that
no rank can leave the word to rank 0. The first rank of a node that has something to say takes a lock, prints and notes
its exit code; every other one waits for the lock, says nothing and ends with that code. The lock is the kernel's
(``flock``): a rank that is killed before it has printed leaves it to the next.

The exit code is noted in a file that is named after the launcher (its process and port), in a private folder of the
user. What was noted before a rank began is of an earlier job of that launcher, such as a shell. A job that fails
removes the files of launchers that have ended; a job that ends well writes none.

Over several nodes, each with a file of its own: what all ranks have to say is said on the first node alone, what one
rank has to say on its node. Ranks elsewhere see no more than a lost connection, which is logged (``train``) and is not
an error message of its own. A supervisor adds who failed first, and why, on every node (``cluster.outcome``).
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def say_once(exit_code: int, say: Callable[[], None]) -> int:
    """Call ``say`` unless a rank of this job on this node has spoken; return the exit code that goes with the message.

    A process alone always speaks, and so does a rank where no file can be written: rather twice than never.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        say()
        return exit_code
    try:
        file = os.open(_file(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        say()
        return exit_code
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)  # nobody ends before the message is there
        said = os.read(file, 64).split()
        if len(said) == 2 and float(said[1]) >= _started_s("self"):
            return int(said[0])
        say()
        with suppress(OSError):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{exit_code} {time.clock_gettime(time.CLOCK_BOOTTIME)}".encode(), 0)
        return exit_code
    finally:
        os.close(file)


def on_first_node() -> bool:
    """Whether this rank is on the node of rank 0: launchers number the ranks node by node."""
    rank = os.environ.get("RANK", "0")
    return os.environ.get("LOCAL_RANK", rank) == rank


def _file() -> Path:
    """The file of this job on this node, the same for all its ranks; of other jobs, those that ended are removed.

    Raises:
        OSError: there is no folder that belongs to this user alone.
    """
    folder = Path(tempfile.gettempdir()) / f"fastdiff-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o7777 != 0o700:
        raise PermissionError(f"{folder}: of another user, or open to others")
    job = "-".join(re.sub(r"[^\w.]", "_", os.environ.get(name, "")) for name in ("MASTER_ADDR", "MASTER_PORT"))
    mine = f"{_LAUNCHER}-{job}"
    for path in folder.glob("*-*"):
        process, started, *_ = path.name.split("-")
        if path.name != mine and str(_started_s(process)) != started:
            path.unlink(missing_ok=True)
    return folder / mine


def _started_s(process: int | str) -> float:
    """When a process was started, in seconds since the machine was; 0 if it is gone."""
    try:
        ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return 0.0
    return int(ticks) / os.sysconf("SC_CLK_TCK")


_LAUNCHER = f"{os.getppid()}-{_started_s(os.getppid())}"
"""Taken on import, when it certainly lives."""
