"""Files of JSON lines in a run folder, such as ``metrics.jsonl``: appended by record, cut back at a resume."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fastdiff.console import log
from fastdiff.files import NO_SPACE, publish
from fastdiff.patient_files import AppendedFile
from fastdiff.run_files import open_inside

Record = dict[str, Any]
LONGEST = 2**20
"""Bytes of a line; no record is as long."""
DEEPEST = 50
"""Levels of objects and arrays in a record, or in another JSON file of a run."""
MALFORMED = (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError)
"""Exceptions of ``parsed``, and of a look into its result."""
_MOST = 2**34
"""Bytes of the largest file of lines that is read: more than the longest run writes."""


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
        on_disk = _content(self._path)
        return _records(on_disk + b"".join(self._waiting))


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, without lines that are none; an absent file has none.

    Raises:
        OSError: the file cannot be read.
    """
    return list(each_record(path))


def each_record(path: Path) -> Iterator[Record]:
    """Yield the records of a file as ``read_records``, with one line in memory at a time.

    Raises:
        OSError: the file cannot be read.
    """
    with suppress(FileNotFoundError), open_lines(path) as file:
        yield from (record for line in whole_lines(file) if (record := record_of(line)) is not None)


def open_lines(path: Path) -> BinaryIO:
    """Open a file of lines to read, in a run folder that may be a stranger's.

    Raises:
        OSError: it cannot be opened, is a link, is no regular file (opening a pipe that has no writer would block), or
            is larger than any log.
    """
    file = os.fdopen(open_inside(path.parent, path.name), "rb")
    if (size := os.fstat(file.fileno()).st_size) > _MOST:
        file.close()
        raise OSError(errno.EFBIG, f"it has {size} bytes, at most {_MOST} are read", str(path))
    return file


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; one that is longer than any record comes in pieces, which are none."""
    return iter(partial(file.readline, LONGEST), b"")


def _content(path: Path) -> bytes:
    try:
        with open_lines(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""


def drop_records_after(path: Path, step: int) -> None:
    """Remove records beyond ``step``, which a resumed run writes again, and lines that are no records.

    The file is replaced or, on a full disk, cut off behind the last record that stays.

    Raises:
        OSError: the file cannot be read or replaced.
    """
    before = _content(path)
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
    """Return the object of a line, or None if it is not one with a number ``step``, or is nested too deeply."""
    try:
        return _checked(line)
    except MALFORMED:
        return None


def why_no_record(line: bytes) -> str:
    """Say in a few words why a line has no record; empty: it has one."""
    try:
        _checked(line)
    except UnicodeDecodeError:
        return "no UTF-8"
    except json.JSONDecodeError:
        return "no JSON"
    except (KeyError, TypeError):
        return "no object with a number step"
    except RecursionError:
        return f"nested more than {DEEPEST} levels"
    except OverflowError:
        return "a number beyond all bounds"
    except ValueError as error:  # also of a number with thousands of digits
        return str(error).partition(";")[0]
    return ""


def _checked(line: bytes) -> Record:
    if len(line) >= LONGEST:
        raise ValueError(f"longer than {LONGEST >> 20} MiB")
    found = parsed(line)
    if not isinstance(found["step"], int | float):
        raise TypeError
    float(found["step"])
    return found  # type: ignore[no-any-return]  # it has a field "step"


def parsed(content: bytes) -> Any:
    """Return the value of JSON text of foreign origin.

    Raises:
        ValueError: it is none, or has a number of thousands of digits.
        RecursionError: it is nested more than ``DEEPEST`` levels, on which others, who walk through it, would fail.
    """
    found = json.loads(content)
    if content.count(b"[") + content.count(b"{") > DEEPEST and not _is_flat(found, DEEPEST):
        raise RecursionError(f"nested more than {DEEPEST} levels")
    return found


def _is_flat(value: Any, levels: int) -> bool:
    """Return whether a value has at most so many levels of objects and arrays."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_flat(one, levels - 1) for one in inner)


def _records(content: bytes) -> list[Record]:
    return [record for line in content.splitlines() if (record := record_of(line)) is not None]
