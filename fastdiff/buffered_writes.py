"""Buffered writes: files of a run folder wait in memory while the disk is full, if the run survives failed saves."""

import os
from collections import deque
from pathlib import Path

from fastdiff.console import log
from fastdiff.files import NO_SPACE, publish

_MOST = 2**26
"""Bytes of a file, or of all whole files, that wait in memory; later ones are lost."""


class _FullDisks:
    """Disks without room and the files that wait for it; each is reported when its first file has to wait.

    A file that waits for another reason is reported by its own name.
    """

    def __init__(self) -> None:
        self._waiting: dict[Path, set[Path]] = {}

    def note(self, path: Path, error: OSError) -> None:
        """Note that a file waits."""
        is_full = error.errno in NO_SPACE
        where = mount_point(path) if is_full else path
        if where not in self._waiting:
            what = f"{path} and later files on this disk wait" if is_full else "it waits"
            warning = f"{where}: {error.strerror}; {what} in memory until there is room"
            log.warning(warning, extra={"repeats": True})  # it may become full again
        self._waiting.setdefault(where, set()).add(path)

    def forget(self, path: Path) -> None:
        """Note that a file is written, or lost."""
        for where, waiting in list(self._waiting.items()):
            waiting.discard(path)
            if not waiting:
                del self._waiting[where]


def mount_point(path: Path) -> Path:
    """Return where the file system of a file is mounted; the file and its folder need not exist."""
    folder = Path(os.path.realpath(path.parent))
    while not os.path.ismount(folder):
        folder = folder.parent
    return folder


_full_disks = _FullDisks()


class AppendedFile:
    """An append-only file of records, unbuffered; the first record creates it and its folder.

    Args:
        path: of the file; a link is refused.
        buffered: keep records that cannot be written in memory, and write them before the next one.
    """

    def __init__(self, path: Path, *, buffered: bool = False) -> None:
        self._path = path
        self._buffered = buffered
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._descriptor: int | None = None

    def append(self, record: bytes) -> None:
        """Append one record; OSError, with the path, if it cannot be written and the file is not ``buffered``."""
        if self._waiting and sum(map(len, self._waiting)) + len(record) > _MOST:
            self._lost += 1
        else:
            self._waiting.append(record)
        self.retry()

    def retry(self) -> None:
        """Write the records that wait, as far as there is room; OSError as ``append``."""
        try:
            self._write()
        except OSError as error:
            if not self._buffered:
                self._waiting.clear()
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            _full_disks.note(self._path, error)

    def close(self) -> None:
        """Write what still waits, if possible, and close the file."""
        try:
            self._write()
        except OSError as error:
            self._lost += len(self._waiting)
            log.warning(f"{self._path}: {error.strerror}")
            _full_disks.forget(self._path)
        if self._lost:
            log.warning(f"{self._path}: {self._lost} records are lost, for which there was no room")
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self) -> None:
        if self._waiting and self._descriptor is None:
            self._path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        while self._waiting:  # a full disk may take a part of a record; the rest follows later
            written = os.write(self._descriptor, self._waiting[0])  # type: ignore[arg-type]
            self._waiting[0] = self._waiting[0][written:]
            if not self._waiting[0]:
                self._waiting.popleft()
        _full_disks.forget(self._path)


class WholeFiles:
    """Files written at once and atomically, as pictures; ``buffered`` keeps in memory what cannot be written yet."""

    def __init__(self, *, buffered: bool = False) -> None:
        self._buffered = buffered
        self._waiting: dict[Path, bytes] = {}
        self._hasty: set[Path] = set()

    def write(self, path: Path, content: bytes, *, durable: bool = True) -> None:
        """Write a file, and its folder if missing.

        Args:
            path: of the file.
            content: of the file.
            durable: False: do not wait until it is on the disk.

        Raises:
            OSError: with the path; it cannot be written, and the files are not ``buffered``.
        """
        self._waiting[path] = content
        if not durable:
            self._hasty.add(path)
        self.retry()

    def retry(self) -> None:
        """Write the files that wait, as far as there is room; OSError as ``write``."""
        for path, content in list(self._waiting.items()):
            try:
                path.parent.mkdir(exist_ok=True)
                publish(path, content, durable=path not in self._hasty)
            except OSError as error:
                if not self._buffered:
                    del self._waiting[path]
                    raise
                self._keep(path, error)
            else:
                del self._waiting[path]
                _full_disks.forget(path)

    def close(self) -> None:
        """Write what still waits, if possible."""
        self.retry()
        for path in self._waiting:
            log.warning(f"{path} is lost, for which there was no room")
            _full_disks.forget(path)

    def _keep(self, path: Path, error: OSError) -> None:
        if sum(map(len, self._waiting.values())) > _MOST:
            del self._waiting[path]
            log.warning(f"{path} is lost: {error.strerror}, and too many files wait in memory")
            _full_disks.forget(path)
        else:
            _full_disks.note(path, error)
