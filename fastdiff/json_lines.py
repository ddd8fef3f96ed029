"""Files of JSON lines in a run folder, such as ``metrics.jsonl``: appended by record, cut back at a resume."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from fastdiff.buffered_writes import AppendedFile
from fastdiff.console import log
from fastdiff.files import rename, temporary
from fastdiff.run_files import open_inside

Record = dict[str, Any]
LONGEST = 2**20
"""Bytes of a line; no record is as long."""
DEEPEST = 50
"""Levels of objects and arrays in a record, or in another JSON file of a run."""
MALFORMED = (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError)
"""Exceptions of ``parsed``, and of a look into its result."""
_TAIL = 2**22
"""Bytes of the end of a file that are in memory at once; a resume reads no more of it, where that holds a record that
stays."""
_MOST = 2**34
"""Bytes of the largest file of lines that is read: more than the longest run writes."""


class JsonLines(AppendedFile):
    """An append-only file with one JSON object per line; see ``AppendedFile`` for its arguments."""

    def write(self, record: Record) -> None:
        """Append one record, null for NaN and infinity, which JSON lacks; OSError as ``append``."""
        clean = {k: None if isinstance(v, float) and v - v != 0 else v for k, v in record.items()}
        self.append(json.dumps(clean).encode() + b"\n")

    def count(self) -> int:
        """Return the number of records, also of those that wait for room; OSError if the file cannot be read."""
        return sum(1 for _ in each_record(self._path)) + len(self._waiting)

    def last(self) -> Record | None:
        """Return the last record, also one that waits for room; None: there is none. OSError: it cannot be read."""
        return record_of(self._waiting[-1]) if self._waiting else last_record(self._path)


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, without lines that are none; an absent file has none. OSError: unreadable."""
    return list(each_record(path))


def each_record(path: Path) -> Iterator[Record]:
    """Yield the records of a file as ``read_records``, with one line in memory at a time."""
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


def last_record(path: Path) -> Record | None:
    """Return the last record in the last ``_TAIL`` bytes of a file; None: none, or no file. OSError: unreadable."""
    with suppress(FileNotFoundError), _opened(path) as file:
        for _, block in islice(_blocks_from_end(file), 1):
            return next((found for line in reversed(block.splitlines()) if (found := record_of(line))), None)
    return None


def drop_records_after(path: Path, step: int) -> None:
    """Remove records beyond ``step``, which a resumed run writes again, and lines near them that are no records.

    Only the end of the file is read, back to a record that stays; there the file is cut off. OSError: that fails.
    """
    try:
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            start, block, broken = _end_that_stays(file, step)
    except FileNotFoundError:
        return
    if broken:
        log.warning(f"{path}: removed {broken} lines that are no records, left by a kill or a fault of the disk")
    kept = b"".join(line + b"\n" for line in block.splitlines() if _is_until(line, step))
    if block.startswith(kept):
        if start + len(kept) < size:
            _cut(path, start + len(kept))
    else:
        _replace_end(path, start, kept)


def _end_that_stays(file: BinaryIO, step: int) -> tuple[int, bytes, int]:
    """Return the start and the lines of the last block with a record until ``step``, and how many lines are none.

    Of a file without such a record, the start is 0, and there are no lines.
    """
    broken = 0
    for start, block in _blocks_from_end(file):
        lines = block.splitlines()
        broken += sum(record_of(line) is None for line in lines)
        if any(_is_until(line, step) for line in lines):
            return start, block, broken
    return 0, b"", broken


def _is_until(line: bytes, step: int) -> bool:
    record = record_of(line)
    return record is not None and bool(record["step"] <= step)


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(open_inside(path.parent, path.name), "rb")


def _blocks_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield a file in blocks of whole lines of at most ``_TAIL`` bytes, each with its start, the last one first.

    What is longer is no line of ours, and is left out.
    """
    end = os.fstat(file.fileno()).st_size
    while end > 0:
        start = max(end - _TAIL, 0)
        block = os.pread(file.fileno(), end - start, start)
        if start:
            inside = block.find(b"\n", 0, len(block) - 1) + 1  # the first line may have begun before
            if not inside:
                end = start
                continue
            start, block = start + inside, block[inside:]
        yield start, block
        end = start


def _replace_end(path: Path, start: int, content: bytes) -> None:
    """Replace a file by its first ``start`` bytes and ``content``; it is whole or as before."""
    source = temporary(path)
    try:
        with _opened(path) as before, source.open("xb") as file:
            while (room := start - file.tell()) and (part := before.read(min(room, _TAIL))):
                file.write(part)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        rename(source, path)
    except OSError as error:
        with suppress(OSError):
            source.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


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
