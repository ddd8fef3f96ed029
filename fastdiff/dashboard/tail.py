"""New records of a file of JSON lines that another process appends to, cuts back or replaces."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fastdiff.json_lines import Record, open_lines, record_of

_CHUNK = 2**20
_ANCHOR = 64
"""Bytes before the place reached by which a file is known as the one that was read."""


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

    def read(self, until: float = math.inf) -> bool:
        """Give the new records to the sink; return whether there are no more.

        A file that is absent has no records. Of one that cannot be read, or whose folder is gone too, those that have
        been read stay.

        Args:
            until: time of ``time.monotonic`` after which no further chunk is read.
        """
        try:
            file = open_lines(self._path)
        except FileNotFoundError:
            if self._path.parent.is_dir():
                self._begin(None)
            return True
        except OSError:
            return True
        with file, suppress(OSError):
            status = os.fstat(file.fileno())
            self._begin((status.st_dev, status.st_ino))
            self.size = status.st_size
            return self._read(file.fileno(), until)
        return True

    def _begin(self, file: tuple[int, int] | None) -> None:
        if file != self._file:
            self._file, self.offset, self.size, self._anchor = file, 0, 0, b""
            self._sink.clear()

    def _read(self, descriptor: int, until: float) -> bool:
        if os.pread(descriptor, len(self._anchor), self.offset - len(self._anchor)) != self._anchor:
            self.offset, self._anchor = 0, b""
            self._sink.clear()
        while chunk := os.pread(descriptor, _CHUNK, self.offset):
            whole = chunk[: chunk.rfind(b"\n") + 1]
            if not whole:
                if len(chunk) < _CHUNK:
                    return True
                whole = chunk  # no record is as long
            for line in whole.splitlines():
                if (record := record_of(line)) is not None:
                    self._sink.add(record)
            self.offset += len(whole)
            self._anchor = (self._anchor + whole)[-_ANCHOR:]
            if len(chunk) == _CHUNK and time.monotonic() > until:
                return False
        return True
