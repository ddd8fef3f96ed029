"""Locks of torch's extension builder. It waits without a word, and for ever, for one whose owner was killed.

The builder (``torch.utils.file_baton``) creates a file ``lock`` and keeps it open until it removes it. So a lock that
no process of this machine has open is stale, but for the moment between closing and removing it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fastdiff.errors import ConfigError
from fastdiff.parallel import extension_locks

_SETTLE_S = 1.0
_POLL_S = 0.5
_PROGRESS_S = 10.0
_LONGEST_BUILD_S = 600.0
"""No build takes so long."""
_SHARED = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "9p",
    "afs",
    "glusterfs",
    "wekafs",
    "fuse",
)
"""File systems that other machines may use at the same time; what begins with the last is often one."""


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock file, as it was found."""

    path: Path
    inode: int
    age_s: float
    holder: int | None
    """The process of this machine that has it open; None: there is none."""


def folder() -> Path:
    """Return the folder in which torch builds extensions."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    from torch.utils.cpp_extension import get_default_build_root  # imports setuptools

    return Path(get_default_build_root())


def find(root: Path) -> list[Lock]:
    """Return all locks below ``root``, and who holds them."""
    found = []
    for path in sorted(root.glob("**/lock")):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        holder = _holder(status)
        found.append(Lock(path, status.st_ino, max(0.0, time.time() - status.st_mtime), holder))
    return found


def find_stale(root: Path) -> list[Lock]:
    """Return the locks below ``root`` that nobody holds, and that are still there a moment later."""
    suspects = {lock.inode for lock in find(root) if lock.holder is None}
    if not suspects:
        return []
    time.sleep(_SETTLE_S)
    return [lock for lock in find(root) if lock.holder is None and lock.inode in suspects]


def wait(root: Path, operator: str, say: Callable[[str], None]) -> None:
    """Return when nobody builds ``operator`` (or a version of it) in ``root``.

    Args:
        root: the folder of all extensions.
        operator: name of the folder in which it is built.
        say: prints a line of progress, every ten seconds.

    Raises:
        ConfigError: a build was killed and left its lock. On storage that other machines share it is told by its age
            alone, as they may hold it; what to do is said at once.
    """
    told_s = float("-inf")
    elsewhere = is_shared(root)
    explained: set[Path] = set()
    while True:
        for build in root.glob(f"**/{operator}"):
            for lock in find_stale(build):
                if not elsewhere or lock.age_s > _LONGEST_BUILD_S:
                    raise ConfigError(explain(lock))
                if lock.path not in explained:
                    explained.add(lock.path)
                    say(f"waiting until it is {_LONGEST_BUILD_S / 60:.0f} minutes old: {explain(lock)}")
        held = [lock for build in root.glob(f"**/{operator}") for lock in find(build)]
        if not held:
            return
        if held[0].holder is not None and time.monotonic() - told_s > _PROGRESS_S:
            told_s = time.monotonic()
            say(f"waiting for process {held[0].holder}, which compiles {operator} ({held[0].path})")
        time.sleep(_POLL_S)


def explain(lock: Lock) -> str:
    """Say what a stale lock is, and what to do."""
    return (
        f"{lock.path}: the lock of a build, {lock.age_s / 60:.0f} minutes old, and no process that can be seen on this "
        "machine holds it; every start would wait on it for ever. If no other machine or container that shares this "
        f"folder builds now, delete it: rm '{lock.path}'"
    )


def is_shared(folder: Path) -> bool:
    """Return whether other machines may see ``folder``, which need not exist."""
    places = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    kinds = {place[4].replace("\\040", " "): place[place.index("-") + 1] for place in places}
    real = folder.resolve()
    kind = next((kinds[str(above)] for above in (real, *real.parents) if str(above) in kinds), "")
    return kind in _SHARED or kind.startswith("fuse.")


def _holder(status: os.stat_result) -> int | None:
    for process, path in _open_locks():
        try:
            opened = path.stat()
        except OSError:
            continue
        if (opened.st_dev, opened.st_ino) == (status.st_dev, status.st_ino):
            return process
    return None


def _open_locks() -> Iterator[tuple[int, Path]]:
    """Yield (process, descriptor) of all open files named ``lock``; others, maybe on dead storage, are not touched."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for descriptor in (process / "fd").iterdir():
                if Path(os.readlink(descriptor)).name == "lock":
                    yield int(process.name), descriptor
        except OSError:  # it ended, or is another user's
            continue


def stale_locks() -> Iterator[str]:
    """A process that is killed while it builds an operator leaves a lock, on which every later start waits for ever."""
    for lock in extension_locks.find_stale(extension_locks.folder()):
        yield f"PROBLEM: {extension_locks.explain(lock)}"
