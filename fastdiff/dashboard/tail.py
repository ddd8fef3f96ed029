"""New records of a file of JSON lines that another process appends to, cuts back or replaces."""

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fastdiff.json_lines import Record, open_lines, record_of, why_no_record

_CHUNK = 2**20
_MOST_NAMED = 20
"""Lines that are no records which are kept with their reason; the others are counted."""
_ANCHOR = 64
"""Bytes before the place reached; equal ones mean that the file is still the one that was read."""


class Sink(Protocol):
    """Where records go."""

    def clear(self) -> None:
        """Forget all records: the file begins anew."""

    def add(self, record: Record) -> None:
        """Take the next record."""


class Tail:
    """The place in a file up to which its lines have been read.

    A line without its end is left for the next time. A resumed run replaces its files by shorter ones, a full disk lets
    it cut them off, and a run that begins anew may leave others under the same names: in each case the reading begins
    anew, too.
    """

    def __init__(self, path: Path, sink: Sink) -> None:
        self._path, self._sink = path, sink
        self._file: tuple[int, int] | None = None
        self.offset, self.size = 0, 0
        """Bytes read, and bytes that there are."""
        self._anchor = b""
        self._lines, self._left_out = 0, 0
        self._named: list[str] = []
        self._unreadable = ""
        self._is_within = False
        """Whether the place is within a line that is longer than any record."""

    @property
    def left_out(self) -> list[str]:
        """What of the file has not been given to the sink, and why; not a last line whose end is still to come."""
        more = self._left_out - len(self._named)
        named = [*self._named, *([f"{more:,} further lines"] if more else [])]
        return [*([self._unreadable] if self._unreadable else []), *named]

    def read(self, until: float = math.inf) -> bool:
        """Give the new records to the sink; return whether there are no more.

        A file that is absent has no records. Of one that cannot be read, or whose folder is gone too, those that have
        been read stay. No further chunk is read after ``until``, of ``time.monotonic``.
        """
        try:
            file = open_lines(self._path)
        except FileNotFoundError:
            if self._path.parent.is_dir():
                self._begin(None)
            self._unreadable = ""
            return True
        except OSError as error:
            self._unreadable = error.strerror or "it cannot be read"
            return True
        self._unreadable = ""
        with file, suppress(OSError):
            status = os.fstat(file.fileno())
            self._begin((status.st_dev, status.st_ino))
            self.size = status.st_size
            return self._read(file.fileno(), until)
        return True

    def _begin(self, file: tuple[int, int] | None) -> None:
        if file != self._file:
            self._file, self.size = file, 0
            self._forget()

    def _forget(self) -> None:
        self.offset, self._anchor = 0, b""
        self._lines, self._left_out, self._named, self._is_within = 0, 0, [], False
        self._sink.clear()

    def _read(self, descriptor: int, until: float) -> bool:
        if os.pread(descriptor, len(self._anchor), self.offset - len(self._anchor)) != self._anchor:
            self._forget()
        while chunk := os.pread(descriptor, _CHUNK, self.offset):
            whole = chunk[: chunk.rfind(b"\n") + 1]
            if not whole:
                if len(chunk) < _CHUNK:
                    return True
                whole = chunk  # no record is as long
            self._take_all(whole)
            self.offset += len(whole)
            self._anchor = (self._anchor + whole)[-_ANCHOR:]
            if len(chunk) == _CHUNK and time.monotonic() > until:
                return False
        return True

    def _take_all(self, whole: bytes) -> None:
        """Take whole lines, or a chunk of a line that is longer than any record."""
        *ended, rest = whole.split(b"\n")
        if rest:
            self._is_within = True
            return
        if self._is_within and ended:
            self._leave_out(f"longer than {_CHUNK >> 20} MiB")
            del ended[0]
            self._is_within = False
        for line in ended:
            self._take(line)

    def _take(self, line: bytes) -> None:
        if (record := record_of(line)) is not None:
            self._lines += 1
            self._sink.add(record)
        elif line.strip():
            self._leave_out(why_no_record(line))
        else:
            self._lines += 1

    def _leave_out(self, why: str) -> None:
        self._lines += 1
        self._left_out += 1
        if len(self._named) < _MOST_NAMED:
            self._named.append(f"line {self._lines:,}: {why}")
