"""Reads of a run folder, which may be a stranger's: nothing outside it is opened, and nothing that blocks.

The folder of the run itself may be a link, because the user names it. Below it no link is followed, and a file is a
regular one: a link could lead to any file of the user, the opening of a pipe would wait for its writer, and a device
may have no end. Everything that reads files of a run by their names in it goes through this module.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from fastdiff.files import read_bounded

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
LINK = "it is a link, which is not followed in a run folder"


def open_inside(run: Path, name: str | PurePath) -> int:
    """Return a descriptor to read a regular file of a run folder.

    Args:
        run: the folder.
        name: of the file in it, without ``..``.

    Raises:
        OSError: it cannot be opened, is no regular file, or is a link or behind one (ELOOP); with the path.
    """
    *folders, last = _parts(run, name)
    with _opened_folder(run, folders) as parent:
        descriptor = _open(last, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, parent, run / name)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a file", str(run / name))


def read_inside(run: Path, name: str | PurePath, most: int) -> bytes:
    """Return the content of a file of a run folder, of at most ``most`` bytes.

    Raises:
        ValueError: it is larger, or grows during the read.
        OSError: see ``open_inside``.
    """
    return read_bounded(open_inside(run, name), most)


def names_inside(run: Path, folder: str | PurePath) -> list[str]:
    """Return the sorted names in a folder of a run; none if missing or no folder. OSError as ``open_inside``."""
    *folders, last = _parts(run, folder)
    try:
        with _opened_folder(run, folders) as parent:
            descriptor = _open(last, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, parent, run / folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return sorted(os.listdir(descriptor))
    finally:
        os.close(descriptor)


def _parts(run: Path, name: str | PurePath) -> tuple[str, ...]:
    parts = PurePath(name).parts
    if not parts or ".." in parts or PurePath(name).is_absolute():
        raise OSError(errno.EINVAL, "it is no name in the run folder", str(run / name))
    return parts


@contextmanager
def _opened_folder(run: Path, folders: list[str]) -> Iterator[int]:
    """Open a folder below that of the run, step by step."""
    path, descriptor = run, os.open(run, _FOLDER)
    try:
        for name in folders:
            path /= name
            inner = _open(name, _FOLDER, descriptor, path)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _open(name: str, flags: int, parent: int, path: Path) -> int:
    """Open an entry of a folder that is no link; errors have its path."""
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        # With O_DIRECTORY a link is ENOTDIR.
        is_link = error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(name, parent)
        code, text = (errno.ELOOP, LINK) if is_link else (error.errno, error.strerror)
        raise OSError(code, text, str(path)) from None


def _is_link(name: str, parent: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False
