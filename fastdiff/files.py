"""Durable writes, atomic renames and bounded reads of files."""

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastdiff.errors import ConfigError, StorageError, remedy

_CHUNK = 2**23
"""Bytes per write; other threads run between two writes."""
_KEEP_SIZE = 1
"""FALLOC_FL_KEEP_SIZE: the size stays that of the written bytes, so a truncated file does not look complete."""
_FEWEST_OPEN_FILES, _OPEN_FILES = 256, 2**16
"""Limits of open files: what a run needs, and what no run exceeds; some programs close each number up to the limit."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk and of a spent quota."""
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def write_file(path: Path, parts: Sequence[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file in one pass over its parts, and wait until it is on the disk.

    Args:
        path: must not exist.
        parts: its bytes, in order.

    Returns:
        ``bytes``, the size, and ``sha256``, the hexadecimal digest.

    Raises:
        StorageError: it could not be written; the partial file stays.
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
    """Reserve space for a file if the file system supports it, so that a full disk fails before the first byte.

    ``os.posix_fallocate`` is not used: without support of the file system it writes to every block. OSError: there is
    no space.
    """
    code = _fallocate(descriptor, _KEEP_SIZE, 0, size)
    if code not in (0, *_CANNOT_RESERVE):
        raise OSError(code, os.strerror(code))


def _fallocate(descriptor: int, mode: int, offset: int, size: int) -> int:
    """Call fallocate(2); return 0 or the error number."""
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
    if error.errno in NO_SPACE:
        free = shutil.disk_usage(path.parent).free
        return no_space(path.parent, path.name, size, free)
    return StorageError(f"{path}: could not be written ({error.strerror}); {remedy(error)}")


def no_space(folder: Path, what: str, needed: int, free: int) -> StorageError:
    """Return the error for ``what`` that needs more bytes than are free in ``folder``."""
    return StorageError(
        f"no space on {folder}: {what} needs {needed / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free; the earlier "
        "checkpoints are intact: free some space and start the same command again"
    )


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents, and wait until they are on the disk; OSError if one could not be made."""
    if not path.exists():
        make_folders(path.parent)
        path.mkdir()
        fsync(path.parent)


def remove(path: Path) -> None:
    """Remove a file, a link (never its target) or a folder with its content; OSError if it could not be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def fsync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk; OSError with its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


# Concurrent encodes of the same folder, on this machine or another one, use other temporary names.
_TOKEN = secrets.token_hex(4)


def temporary(path: Path) -> Path:
    """Return the temporary name of ``path`` in this process; no other process uses the same."""
    return path.with_name(f"{path.name}.{os.getpid()}-{_TOKEN}.tmp")


def publish(path: Path, content: bytes, mode: int = 0o666, *, masked: bool = True, durable: bool = True) -> None:
    """Write a small file under a temporary name, fsync, rename, fsync the folder.

    A link of the temporary name is not followed, and one of the final name is replaced.

    Args:
        path: of the file.
        content: of the file.
        mode: its permissions.
        masked: less those of the umask.
        durable: False: do not wait until it is on the disk.

    Raises:
        OSError: with the name of the file; nothing is left of it.
    """
    source = temporary(path)
    try:
        with open(source, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if not masked:
                os.fchmod(file.fileno(), mode)
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if durable:
            rename(source, path)
        else:
            source.replace(path)
    except OSError as error:
        with suppress(OSError):
            source.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def make_parents(path: Path) -> None:
    """Make the missing folders above ``path``; OSError: one cannot be made, ENOTDIR where a file is in its place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def is_temporary(name: str, of: str) -> bool:
    """Return whether ``name`` is a temporary name of the file ``of``, in any process."""
    return re.fullmatch(re.escape(of) + r"\.[0-9]+-[0-9a-f]{8}\.tmp", name) is not None


_OF_OTHERS = frozenset(
    {
        "@eadir", "@__thumb", "#recycle", "#snapshot", "@recycle", "@recently-snapshot",  # network storage
        "__macosx", "icon\r",  # macOS
        "$recycle.bin", "recycler", "system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini",  # Windows
        "picasa.ini", "lost+found", "__pycache__",
    }
)  # fmt: skip
"""Names of files and folders that other programs leave among a user's, in lower case."""


def of_other_program(name: str) -> bool:
    """Return whether a file or folder of this name is hidden, or left by another program."""
    return name.startswith(".") or name.lower() in _OF_OTHERS


def rename(source: Path, target: Path) -> None:
    """Rename an fsynced file within its folder and make the new name durable."""
    source.replace(target)
    fsync(target.parent)


_ATTEMPTS = 1000
"""Attempts at an entry that other processes remove meanwhile; where it can never be made, the last one fails."""


def open_lock_in(folder: Path, name: str) -> int:
    """Open the lock ``name``, made if missing, in a folder that others remove when they are done; OSError: it fails."""
    for _ in range(_ATTEMPTS):
        folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # removed meanwhile
            return open_lock(folder / name)
    return open_lock(folder / name)


def open_lock(path: Path) -> int:
    """Open the file of a lock, made if missing, and return its descriptor; OSError: it fails, or is a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def lock(descriptor: int, folder: Path) -> None:
    """Lock an open file of ``folder`` until it is closed.

    Raises:
        BlockingIOError: another process holds the lock.
        StorageError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:  # ENOLCK, EOPNOTSUPP
        raise StorageError(
            f"{folder}: its file system cannot lock files ({error.strerror}), which keeps two jobs apart; choose a "
            "folder on another one, or mount it with locks (NFS: local_lock=flock)"
        ) from None


_UNFINISHED, _CONTENT, _REPLACED = ".fastdiff-unfinished", "content", "replaced"
"""Entries of the folder in which another one is written: a file that its writer locks, the content, and, for a moment,
the folder that it replaces."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Of Linux's renameat2: paths count from the working directory; exchange both."""


def is_free(out: Path) -> bool:
    """Whether a new folder can take this name: nothing has it, or an empty folder."""
    if not os.path.lexists(out):
        return True
    named = out.name not in ("", "..")
    return named and out.is_dir() and not out.is_symlink() and not any(out.iterdir())


@contextmanager
def unfinished_folder(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a new folder in ``out.unfinished``, which becomes ``out`` at the end, when it is on the disk.

    A leftover of a killed process is removed first; a folder of that name that is no leftover stays.

    Args:
        out: name of the folder at the end; there may be an empty one.
        replace: take the place of a folder ``out``, which is then removed.

    Raises:
        ConfigError: ``out`` is taken, another process writes it, or a folder of someone else has the temporary name.
        OSError: a file cannot be written.
    """
    if not replace and not is_free(out):
        raise ConfigError(f"{out} exists; choose another name, or delete it")
    place = out.with_name(f"{out.name}.unfinished")
    make_parents(place)
    marker = _claim_unfinished(place, out)
    try:
        folder = place / _CONTENT
        folder.mkdir()
        yield folder
        for path in (*folder.rglob("*"), folder):
            fsync(path)
        if is_free(out):
            folder.rename(out)  # also over an empty folder
        elif replace and out.is_dir() and not out.is_symlink():
            _exchange(folder, out)
        else:
            raise ConfigError(f"{out} appeared meanwhile; choose another name")
        fsync(out.parent)
    finally:
        _remove_unfinished(place)
        os.close(marker)


def _exchange(new: Path, old: Path) -> None:
    """Exchange two folders in one operation; where the file system has none, ``old`` moves out of the way first."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return
    if (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(number, os.strerror(number), str(old))
    aside = new.with_name(_REPLACED)
    old.rename(aside)
    new.rename(old)
    aside.rename(new)


def _claim_unfinished(place: Path, out: Path) -> int:
    """Make the folder with its locked marker, in place of a leftover; return the marker's descriptor."""
    busy = ConfigError(f"another process is writing {out}; wait for it, or choose another name")
    for _ in range(_ATTEMPTS):
        try:
            place.mkdir()
        except FileExistsError:
            _remove_leftover(place, out, busy)
            continue
        try:
            marker = os.open(place / _UNFINISHED, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except (FileExistsError, FileNotFoundError):  # another process has claimed the folder, or removed it empty
            continue
        try:
            lock(marker, place)
        except BlockingIOError:
            os.close(marker)
            raise busy from None
        if os.fstat(marker).st_nlink:
            return marker
        os.close(marker)  # another process has removed it before the lock
    raise StorageError(f"{place}: it can neither be used nor removed; remove it, or choose another name")


def _remove_leftover(place: Path, out: Path, busy: ConfigError) -> None:
    """Remove the folder of a killed process; raise ConfigError if it is of a living one, or of someone else."""
    try:
        marker = os.open(place / _UNFINISHED, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        with suppress(OSError):
            place.rmdir()  # killed before the marker; only an empty folder can be removed so
            return
        if not (place.exists() or place.is_symlink()):
            return
        raise ConfigError(
            f"{place} exists and is not of fastdiff, which would write {out} under this name first; rename it, or "
            "choose another name"
        ) from None
    try:
        lock(marker, place)
        _remove_unfinished(place)
    except BlockingIOError:
        raise busy from None
    finally:
        os.close(marker)


def _remove_unfinished(place: Path) -> None:
    """Remove the content and then the marker, so that a kill leaves a folder that is known as a leftover."""
    for name in (_CONTENT, _REPLACED):
        shutil.rmtree(place / name, ignore_errors=True)
    with suppress(OSError):
        (place / _UNFINISHED).unlink()
        place.rmdir()


def raise_open_files() -> None:
    """Raise the soft limit of open files, of children too, to the hard one; ConfigError: that is too low for a run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if most < _FEWEST_OPEN_FILES:
        raise ConfigError(
            f"this process may open {most} files (ulimit -Hn), expected at least {_FEWEST_OPEN_FILES}; raise the limit "
            "with ulimit -n, or in /etc/security/limits.conf"
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def read_bounded(path: Path | int, most: int) -> bytes:
    """Read a regular file with a size limit; refuse pipes and devices.

    Args:
        path: of the file, links are followed; or a descriptor, opened with ``O_NONBLOCK``, which is closed.
        most: largest accepted size in bytes.

    Raises:
        ValueError: it is larger, grows during the read, or is no regular file.
        OSError: it cannot be read.
    """
    # Without O_NONBLOCK, opening a pipe that has no writer would block.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size} bytes, at most {most} are read")
        size = status.st_size or most  # kernel files (/proc, /sys) report size 0
        content = file.read(size + 1)
    if len(content) > size:
        raise ValueError(f"it has more than {size} bytes, and grows or is larger than it says")
    return content


def file_digest(path: Path) -> str:
    """Return the sha256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
