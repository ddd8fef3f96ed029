"""The limits of threads and processes: their values, a trial before the work, and the errors where one is reached.

Libraries treat a thread that cannot start in ways of their own: OpenMP ends the process with 1, OpenBLAS sends it
SIGINT. Therefore a process tries to start as many threads as they will, before it imports them.
"""

import errno
import os
import resource
import threading
from pathlib import Path

_OWN = 8
"""Threads of a process besides those of OpenMP and OpenBLAS: signals, heartbeat, saves, loader, progress bar."""
_MOST = 64
"""Threads that OpenBLAS starts at most, in the wheels of numpy."""
_TEXTS = ("can't start new thread", "unable to start watchdog thread", os.strerror(errno.EAGAIN))
"""Whole errors of threading, faulthandler, and of std::thread, fork and clone."""
_GROUPS, _CONTROLLERS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def is_reached(error: Exception) -> bool:
    """Return whether a thread or a process could not be started because there are too many."""
    if isinstance(error, OSError):
        # A descriptor that would block has another text.
        return error.errno == errno.EAGAIN and error.filename is None and error.strerror in _TEXTS
    return isinstance(error, RuntimeError) and str(error) in _TEXTS


def try_threads() -> None:
    """Start as many threads as a process needs, and end them; RuntimeError (``is_reached``): one cannot be started."""
    release = threading.Event()
    started = []
    try:
        for _ in range(_OWN + 2 * _of_a_library()):
            thread = threading.Thread(target=release.wait, daemon=True)
            thread.start()
            started.append(thread)
    finally:
        release.set()
        for thread in started:
            thread.join()


def _of_a_library() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    cores = min(len(os.sched_getaffinity(0)), _MOST)
    return min(int(given), 4 * cores) if given.isdecimal() else cores


def limits() -> str:
    """Return the limits of this process in words: ``ulimit -u is 512, pids.max of its cgroup is 100``."""
    found = {"ulimit -u": resource.getrlimit(resource.RLIMIT_NPROC)[0], "pids.max of its cgroup": _of_cgroup()}
    known = [f"{name} is {value}" for name, value in found.items() if value not in (None, resource.RLIM_INFINITY)]
    return ", ".join(known) or "see sysctl kernel.threads-max"


def _of_cgroup() -> int | None:
    """Return the smallest ``pids.max`` of the control group of this process and of those above it; None: no limit."""
    found = []
    try:
        for line in _GROUPS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "pids"):
                continue
            root = _CONTROLLERS / controllers
            folder = root / name.lstrip("/")
            found += [path / "pids.max" for path in (folder, *folder.parents) if path.is_relative_to(root)]
        texts = [path.read_text().strip() for path in found if path.exists()]
    except (OSError, ValueError):
        return None
    return min((int(text) for text in texts if text.isdecimal()), default=None)
