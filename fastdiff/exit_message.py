"""One error message per job: the first rank of a node that fails prints, and the other ranks stay silent.

Launchers (DeepSpeed's, torchrun's, a supervisor) kill the other ranks as soon as one has ended, so rank 0 may die
before it prints. Therefore the first rank of a node with a message takes a lock, prints and records its exit code.
Every other rank waits for the lock, prints nothing and exits with that code. The kernel owns the lock (``flock``): if a
rank is killed before it prints, the next one gets the lock.

The exit code is recorded in a file named after the launcher (its process and port), in a private folder of the user. A
record older than this rank belongs to an earlier job of the same launcher, for example a shell. A failing job removes
the files of launchers that have ended; a successful job writes none.

With several nodes, each has a file of its own. An error of all ranks is printed on the first node only; an error of one
rank is printed on its node. Ranks elsewhere see only a lost connection, which is logged (``train``) and is not an error
message of its own. A supervisor reports on every node who failed first and why (``cluster.supervisor.outcome``).
"""

import fcntl
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fastdiff.private_folders import local_folder

NODE_FOLDER = "FASTDIFF_NODE_FOLDER"
"""Environment variable: the supervisor's private folder on this node."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""Resolution of the kernel's start times, which it rounds down."""


def say_once(exit_code: int, say: Callable[[], None]) -> int:
    """Call ``say`` unless another rank of this job on this node has printed; return the exit code printed.

    A process without other ranks always prints. So does a rank that cannot write the file: two messages are better than
    none.
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
            fcntl.flock(file, fcntl.LOCK_EX)  # no rank exits before the message is printed
        said = os.read(file, 64).split()
        if len(said) == 2 and float(said[1]) > started_s("self") + _TICK_S:
            return int(said[0])
        say()
        with suppress(OSError):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{exit_code} {time.clock_gettime(time.CLOCK_BOOTTIME)}".encode(), 0)
        return exit_code
    finally:
        os.close(file)


def note_message() -> None:
    """Record for the supervisor, if there is one, that this rank has printed the cause of its end."""
    if folder := os.environ.get(NODE_FOLDER):
        with suppress(OSError):
            message_file(Path(folder), int(os.environ.get("RANK", "0"))).touch()


def message_file(node_folder: Path, rank: int) -> Path:
    """Return the file that is there once a rank has printed its message; ``node_folder`` is that of the supervisor."""
    return node_folder / f"rank-{rank:05d}.message"


def on_first_node() -> bool:
    """Return whether this rank is on the node of rank 0; launchers number the ranks node by node."""
    rank = os.environ.get("RANK", "0")
    return os.environ.get("LOCAL_RANK", rank) == rank


def _file() -> Path:
    """Return the file of this job on this node, of all its ranks; remove those of ended jobs. OSError: it cannot."""
    folder = local_folder()
    job = "-".join(re.sub(r"[^\w.]", "_", os.environ.get(name, "")) for name in ("MASTER_ADDR", "MASTER_PORT"))
    mine = f"{_LAUNCHER}-{job}"
    for path in folder.glob("*-*"):
        process, started, *_ = path.name.split("-")
        if path.name != mine and str(started_s(process)) != started:
            path.unlink(missing_ok=True)
    return folder / mine


def started_s(process: int | str) -> float:
    """Return the start time of a process in seconds since boot; 0 if the process is gone."""
    try:
        ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return 0.0
    return int(ticks) * _TICK_S


_LAUNCHER = f"{os.getppid()}-{started_s(os.getppid())}"
"""Computed on import, while the launcher is certainly alive."""
