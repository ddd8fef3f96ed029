"""Files of JSON lines in a run folder, such as ``metrics.jsonl``: appended by record, cut back at a resume."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fastdiff.console import log
from fastdiff.files import NO_SPACE, publish
from fastdiff.patient_files import AppendedFile

Record = dict[str, Any]


class JsonLines(AppendedFile):
    """An append-only file with one JSON object per line; see ``AppendedFile`` for its arguments."""

    def write(self, record: Record) -> None:
        """Append one record; NaN and infinity, which JSON lacks, become null.

        Raises:
            OSError: with the path; the record cannot be written, and the file is not ``patient``.
        """
        clean = {k: None if isinstance(v, float) and v - v != 0 else v for k, v in record.items()}
        self.append(json.dumps(clean).encode() + b"\n")

    def read(self) -> list[Record]:
        """Return the records of the file, also those that wait for room.

        Raises:
            OSError: the file cannot be read.
        """
        on_disk = self._path.read_bytes() if self._path.exists() else b""
        return _records(on_disk + b"".join(self._waiting))


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, without lines that are none; an absent file has none.

    Raises:
        OSError: the file cannot be read.
    """
    return _records(path.read_bytes()) if path.exists() else []


def each_record(path: Path) -> Iterator[Record]:
    """Yield the records of a file as ``read_records``, with one line in memory at a time.

    Raises:
        OSError: the file cannot be read.
    """
    if path.exists():
        with open_lines(path) as file:
            yield from (record for line in file if (record := record_of(line)) is not None)


def open_lines(path: Path) -> BinaryIO:
    """Open a file of lines to read; links are followed.

    Raises:
        OSError: it cannot be opened, or is no regular file: opening a pipe that has no writer would block.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a file", str(path))


def drop_records_after(path: Path, step: int) -> None:
    """Remove records beyond ``step``, which a resumed run writes again, and lines that are no records.

    The file is replaced or, on a full disk, cut off behind the last record that stays.

    Raises:
        OSError: the file cannot be read or replaced.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    found = [(line, record_of(line)) for line in before.splitlines()]
    kept = b"".join(line + b"\n" for line, record in found if record is not None and record["step"] <= step)
    broken = sum(record is None for _, record in found)
    if broken:
        log.warning(f"{path}: removed {broken} lines that are no records, left by a kill or a fault of the disk")
    if kept == before:
        return
    try:
        publish(path, kept)
    except OSError as error:
        if error.errno not in NO_SPACE or not before.startswith(kept):
            raise
        _cut(path, len(kept))


def _cut(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_of(line: bytes) -> Record | None:
    """Return the object of a line, or None if it is not one with a number ``step``."""
    try:
        found = json.loads(line)
        float(found["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return found if isinstance(found["step"], int | float) else None


def _records(content: bytes) -> list[Record]:
    return [record for line in content.splitlines() if (record := record_of(line)) is not None]
