"""Files that are on the disk itself before anyone counts on them."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastdiff.errors import StorageError

_CHUNK = 2**23
"""Bytes per write: between two of them other threads run."""
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: a file that is cut short does not look whole
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file, reading what it is made of once, and wait until it is on the disk.

    Args:
        path: must not exist.
        parts: bytes, which follow one another.

    Returns:
        ``bytes``, the size, and ``sha256``, its hexadecimal digits.

    Raises:
        StorageError: it could not be written; what there is of it stays.
    """
    views = [memoryview(part).cast("B") for part in parts]
    size, digest = sum(len(view) for view in views), hashlib.sha256()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            reserve(descriptor, size)
            for chunk in _chunks(views):
                digest.update(chunk)
                while chunk:
                    chunk = chunk[os.write(descriptor, chunk) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _explained(error, path, size) from None
    return {"bytes": size, "sha256": digest.hexdigest()}


def reserve(descriptor: int, size: int) -> None:
    """Reserve room for a file, where the file system can: so a full disk is found out before the first byte.

    Not ``os.posix_fallocate``: where the file system cannot, that writes to every block instead.

    Raises:
        OSError: there is no room.
    """
    code = _fallocate(descriptor, _KEEP_SIZE, 0, size)
    if code not in (0, *_CANNOT_RESERVE):
        raise OSError(code, os.strerror(code))


def _fallocate(descriptor: int, mode: int, offset: int, size: int) -> int:
    """fallocate(2); returns 0 or the number of the error."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function is None:
        return errno.ENOSYS
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while function(descriptor, mode, offset, size):
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()
    return 0


def _chunks(views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        for start in range(0, len(view), _CHUNK):
            yield view[start : start + _CHUNK]


def _explained(error: OSError, path: Path, size: int) -> StorageError:
    if error.errno in _NO_SPACE:
        free = shutil.disk_usage(path.parent).free
        return no_space(path.parent, path.name, size, free)
    return StorageError(f"{path}: could not be written ({error.strerror})")


def no_space(folder: Path, what: str, needed: int, free: int) -> StorageError:
    """What to say when ``what`` needs more bytes than are free in ``folder``."""
    return StorageError(
        f"no space on {folder}: {what} needs {needed / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free; the earlier "
        "checkpoints are intact: free some space and start the same command again"
    )


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, and wait until they are on the disk.

    Raises:
        OSError: one could not be made.
    """
    if not path.exists():
        make_folders(path.parent)
        path.mkdir()
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk.

    Raises:
        OSError: with the name of the file, which that of the system call has not.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


# Other encodes of the same folder, on this machine or another one, have other names for what they are writing.
_TOKEN = secrets.token_hex(4)


def temporary(path: Path) -> Path:
    """Name of ``path`` while this process writes it; no other process has the same."""
    return path.with_name(f"{path.name}.{os.getpid()}-{_TOKEN}.tmp")


def publish(path: Path, content: bytes) -> None:
    """Write a small file under a temporary name, fsync, rename, fsync the folder; raises OSError."""
    with temporary(path).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rename(temporary(path), path)


def rename(source: Path, target: Path) -> None:
    """Rename an fsynced file within its folder and make the new name durable."""
    source.replace(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a file.

    Args:
        path: Of the file; links are followed.
        most: Bytes that it may have.

    Raises:
        ValueError: It is larger, or grows while it is read, or is no regular file.
        OSError: It cannot be read.
    """
    # A pipe that nobody writes to would be waited for when it is opened.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size} bytes, at most {most} are read")
        size = status.st_size or most  # files of the kernel say that they are empty
        content = file.read(size + 1)
    if len(content) > size:
        raise ValueError(f"it has more than {size} bytes, and grows or is larger than it says")
    return content


def file_digest(path: Path) -> str:
    """Return the sha256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
