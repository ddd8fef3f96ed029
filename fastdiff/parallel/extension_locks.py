"""Stale locks of torch's extension builder: a killed build leaves a lock on which later starts hang silently.

The builder (``torch.utils.file_baton``) creates a file ``lock`` and keeps it open until it removes it. A lock that no
process of this machine has open is therefore stale, except for the moment between its closing and its removal. Only the
holder of a lock of our own (``OURS``, which ends with its process) removes it: of two processes that found the same
lock, the second would remove that of the build which the first has begun.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fastdiff.errors import ConfigError, StorageError
from fastdiff.files import lock as flock

OURS = ".fastdiff.lock"
"""File in the folder of all extensions; its lock (flock) is held during a removal."""
_SETTLE_S = 1.0
_POLL_S = 0.5
_PROGRESS_S = 10.0
_LONGEST_BUILD_S = 600.0
"""Upper limit of the duration of a build."""
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
"""Types of file systems that several machines can mount; ``fuse`` also stands for all ``fuse.*``."""


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock file at the time of the search."""

    path: Path
    inode: int
    age_s: float
    holder: int | None
    """The process of this machine that has it open, if any."""


def folder() -> Path:
    """Return the folder in which torch builds extensions."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    from torch.utils.cpp_extension import get_default_build_root  # imports setuptools

    return Path(get_default_build_root())


def find(root: Path) -> list[Lock]:
    """Return all locks below ``root`` with their holders."""
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
    """Return the locks below ``root`` that no process holds and that still exist a second later."""
    suspects = {lock.inode for lock in find(root) if lock.holder is None}
    if not suspects:
        return []
    time.sleep(_SETTLE_S)
    return [lock for lock in find(root) if lock.holder is None and lock.inode in suspects]


def wait(root: Path, operator: str, say: Callable[[str], None]) -> None:
    """Wait until no process builds ``operator`` (or a version of it) in ``root``; remove the locks of killed builds.

    On shared storage another machine may hold a lock, so only its age counts there.

    Args:
        root: the folder of all extensions.
        operator: name of its build folder.
        say: prints a line of progress, every ten seconds.

    Raises:
        ConfigError: the lock of a killed build cannot be removed; the message says how.
    """
    told_s = float("-inf")
    elsewhere = is_shared(root)
    explained: set[Path] = set()
    while True:
        for build in root.glob(f"**/{operator}"):
            for lock in find_stale(build):
                if not elsewhere or lock.age_s > _LONGEST_BUILD_S:
                    _remove(root, lock, say)
                elif lock.path not in explained:
                    explained.add(lock.path)
                    say(f"waiting until it is {_LONGEST_BUILD_S / 60:.0f} minutes old: {explain(lock)}")
        held = [lock for build in root.glob(f"**/{operator}") for lock in find(build)]
        if not held:
            return
        if held[0].holder is not None and time.monotonic() - told_s > _PROGRESS_S:
            told_s = time.monotonic()
            say(f"waiting for process {held[0].holder}, which compiles {operator} ({held[0].path})")
        time.sleep(_POLL_S)


def _remove(root: Path, stale: Lock, say: Callable[[str], None]) -> None:
    """Remove a stale lock, unless another process is doing that now."""
    try:
        ours = os.open(root / OURS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            flock(ours, root)
            for found in find_stale(stale.path.parent):  # again: another process may have removed it and begun a build
                if found.path == stale.path:
                    found.path.unlink(missing_ok=True)
                    say(f"removed {found.path}, the lock of a build that was killed")
        finally:
            os.close(ours)
    except BlockingIOError:
        return
    except (OSError, StorageError) as error:
        raise ConfigError(f"{explain(stale)} ({error})") from None


def explain(lock: Lock) -> str:
    """Describe a stale lock and its remedy."""
    return (
        f"{lock.path}: the lock of a build, {lock.age_s / 60:.0f} minutes old, held by no visible process of this "
        "machine; every start would wait for it forever. If no other machine or container that shares this folder is "
        f"building, delete it: rm '{lock.path}'"
    )


def is_shared(folder: Path) -> bool:
    """Report whether ``folder``, which need not exist, is on storage shared with other machines."""
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
    """Yield (process, descriptor) of all open files named ``lock``.

    No other open file is touched: it may lie on storage that does not answer.
    """
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for descriptor in (process / "fd").iterdir():
                if Path(os.readlink(descriptor)).name == "lock":
                    yield int(process.name), descriptor
        except OSError:  # the process ended, or belongs to another user
            continue


def stale_locks() -> Iterator[str]:
    """Yield one problem per stale lock of the extension builder, for ``fastdiff doctor``."""
    for lock in find_stale(folder()):
        yield f"PROBLEM: {explain(lock)}"
