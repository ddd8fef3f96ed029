"""Files of JSON lines in a run folder, such as ``metrics.jsonl``: appended by record, cut back at a resume."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fastdiff.console import log
from fastdiff.files import publish

Record = dict[str, Any]


class JsonLines:
    """An append-only file with one JSON object per line, unbuffered; the first record creates it.

    Args:
        path: of the file; a link is refused.
        patient: keep records that cannot be written in memory, and write them before the next one.
    """

    def __init__(self, path: Path, *, patient: bool = False) -> None:
        self._path = path
        self._patient = patient
        self._waiting = b""
        self._descriptor: int | None = None

    def write(self, record: Record) -> None:
        """Append one record; NaN and infinity, which JSON lacks, become null.

        Raises:
            OSError: with the path; the record cannot be written, and the file is not ``patient``.
        """
        clean = {k: None if isinstance(v, float) and v - v != 0 else v for k, v in record.items()}
        self._waiting += json.dumps(clean).encode() + b"\n"
        try:
            self._append()
        except OSError as error:
            if not self._patient:
                self._waiting = b""
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            log.warning(f"{self._path}: {error.strerror}; its records wait in memory until they can be written")

    def close(self) -> None:
        """Write what still waits, if possible, and close the file."""
        try:
            self._append()
        except OSError as error:
            lost = self._waiting.count(b"\n")
            log.warning(f"{self._path}: {error.strerror}; the last {lost} records are lost")
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self) -> None:
        if self._waiting and self._descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        while self._waiting:  # a full disk may take a part of a line; the rest follows later
            self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]  # type: ignore[arg-type]


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, without lines that are none; an absent file has none.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.exists():
        return []
    return [record for line in path.read_bytes().splitlines() if (record := _record(line)) is not None]


def drop_records_after(path: Path, step: int) -> None:
    """Remove records beyond ``step``, which a resumed run writes again, and lines that are no records.

    Raises:
        OSError: the file cannot be read or replaced.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    found = [(line, _record(line)) for line in before.splitlines()]
    kept = b"".join(line + b"\n" for line, record in found if record is not None and record["step"] <= step)
    broken = sum(record is None for _, record in found)
    if broken:
        log.warning(f"{path}: removed {broken} lines that are no records, left by a kill or a fault of the disk")
    if kept != before:
        publish(path, kept)


def _record(line: bytes) -> Record | None:
    """Return the object of a line, or None if it is not one with a number ``step``."""
    try:
        found = json.loads(line)
        float(found["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return found if isinstance(found["step"], int | float) else None
