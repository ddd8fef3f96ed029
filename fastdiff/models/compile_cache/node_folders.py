"""Folders of compiled code on this node: who works in one, and whether its files are whole.

A linker writes its file in place, so a process that is killed may leave half of one, and its compiler may outlive it.
Every process therefore has an entry in the folder in which it works, which it locks, and removes when it leaves without
an error. An entry that nobody locks is of a killed process: no other process comes to that folder, and it is removed
once nobody works there. The next folder of the same code has another name, below which no leftover compiler writes.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from fastdiff.errors import Preempted
from fastdiff.files import open_lock
from fastdiff.private_folders import private

_LOCK, _USERS, _REMOVED = ".lock", ".users", ".removed-"
"""Held by who comes; the entries of processes, in a folder; first letters of the name of a folder that goes."""
_MOST_FOLDERS = 16
"""How many a node keeps; the least recently used ones are removed."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Of the node: a power cut may leave half of a file that was whole."""
_entered: set[tuple[int, Path]] = set()
"""Entries of this process, with its number, because those that it forks have none."""

Filled = TypeVar("Filled")


@contextmanager
def joined(folders: Path, key: str, fill: Callable[[Path], Filled]) -> Iterator[Filled]:
    """Work in the folder of some code; an error but Preempted counts as a kill, because a compiler may still write.

    Args:
        folders: of this user on this node, one per key.
        key: of the code.
        fill: is called with the folder while other processes wait; its result is yielded.

    Raises:
        OSError: a folder cannot be made or is not of this user alone.
    """
    with ExitStack() as stack:
        with _alone(folders):
            first = f"{key}-{_boot()}-"
            folder = _found(folders, first) or _made(folders / f"{first}{secrets.token_hex(4)}")
            entry = folder / _USERS / secrets.token_hex(8)
            stack.enter_context(_entry(entry))
            filled = fill(folder)
        try:
            yield filled
        except Preempted:  # between two steps, where nothing is compiled
            _leave(entry)
            raise
        _leave(entry)


def was_killed(folder: Path) -> bool:
    """Return whether a process was killed in the folder, or the node has removed files of it."""
    return False in _users(folder)


@contextmanager
def _entry(path: Path) -> Iterator[None]:
    """Hold the lock of an entry of this process."""
    lock, own = open_lock(path), (os.getpid(), path)
    _entered.add(own)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # unlike that of flock, forked processes do not have it
        yield
    finally:
        _entered.discard(own)
        os.close(lock)


def _leave(entry: Path) -> None:
    with suppress(OSError):  # the node may have removed it; an entry that stays is as safe as that of a kill
        entry.unlink()


@contextmanager
def _alone(folders: Path) -> Iterator[None]:
    """Wait until no other process comes to a folder."""
    lock = open_lock(folders / _LOCK)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _boot() -> str:
    try:
        return _BOOT.read_text()[:8]
    except OSError:
        return "unknown"


def _found(folders: Path, first: str) -> Path | None:
    """Return the folder whose name begins so and whose files are whole, or None; remove those that nobody may use."""
    found, unused = None, []
    for folder in folders.iterdir():
        if folder.name == _LOCK:
            continue
        users = {False} if folder.name.startswith(_REMOVED) else _users(folder)
        if users == {False}:
            _remove(folder)
        elif False not in users and folder.name.startswith(first):
            found = private(folder)
        elif not users:
            unused.append(folder)
    for folder in sorted(unused, key=_used, reverse=True)[_MOST_FOLDERS - 1 :]:
        _remove(folder)
    return found


def _made(folder: Path) -> Path:
    (private(folder) / _USERS).mkdir(0o700)
    return folder


def _remove(folder: Path) -> None:
    """Remove a folder, with a name first that nobody takes for whole if this process is killed meanwhile."""
    with suppress(OSError):
        if not folder.name.startswith(_REMOVED):
            folder = folder.rename(folder.with_name(f"{_REMOVED}{folder.name}"))
        shutil.rmtree(folder)


def _users(folder: Path) -> set[bool]:
    """Return {True} for living processes in the folder, {False} for killed ones, both, or none."""
    try:
        entries = list((folder / _USERS).iterdir())
    except (FileNotFoundError, NotADirectoryError):  # a leftover compiler has made it, or the node has cleaned it
        return {False}
    return {lives for entry in entries if (lives := _lives(entry)) is not None}


def _lives(entry: Path) -> bool | None:
    """Return whether the process of an entry lives, None if it has left."""
    # Of an own entry no descriptor may be opened: to close any of them would release its lock.
    return True if (os.getpid(), entry) in _entered else is_held(entry, fcntl.lockf)


def is_held(path: Path, lock: Callable[[int, int], object]) -> bool | None:
    """Return whether another process holds a file by this kind of lock, None if the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may ask at the same time
    except BlockingIOError:
        return True
    else:
        return False if os.fstat(descriptor).st_nlink else None
    finally:
        os.close(descriptor)


def _used(folder: Path) -> float:
    """Return when a process came to the folder, or left it, last."""
    return (folder / _USERS).stat().st_mtime
