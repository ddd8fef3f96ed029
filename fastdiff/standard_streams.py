"""Standard output and standard error that never end a process: bytes that they do not accept are dropped.

A log on a full disk (ENOSPC, EDQUOT), a ``tee`` that has ended (EPIPE), a terminal that hung up (EIO) and a descriptor
that was closed by ``>&-`` cost output, and never a run. Characters that the encoding of the terminal lacks are escaped.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_CLOSED = (errno.EPIPE, errno.EIO)
"""Errors of a pipe without a reader, and of a terminal that hung up: they do not go away."""


def open_closed_descriptors() -> None:
    """Open descriptors 0, 1 and 2 on /dev/null where they are closed.

    Call before anything opens a file: it would get the free number, and prints of libraries would go into it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 (as long as the process)


class Lossy(io.RawIOBase):
    """Raw stream of a descriptor that drops the bytes that it does not accept, and does not close the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.error: OSError | None = None
        """The last reason for dropped bytes."""

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Write or drop all bytes of ``data``; return their number."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another program has set the terminal to non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.error = error
                if error.errno in _CLOSED:
                    self._discard()
                break
        return size

    def _discard(self) -> None:
        """Redirect the descriptor to /dev/null, also for code in C and for child processes."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._descriptor)
        os.close(nowhere)


@contextmanager
def lossy_output() -> Iterator[Lossy | None]:
    """Replace ``sys.stdout`` and ``sys.stderr`` by lossy streams of the same descriptors within this context.

    Streams without a descriptor, such as a ``StringIO``, stay. Yields the raw stream of standard output, if replaced.
    """
    before = sys.stdout, sys.stderr
    raws = [_raw(stream) for stream in before]
    sys.stdout, sys.stderr = map(_text, raws, before)
    try:
        yield raws[0]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _raw(stream: TextIO) -> Lossy | None:
    with suppress(OSError, ValueError):
        stream.flush()
    try:
        return Lossy(stream.fileno())
    except (OSError, ValueError):  # it has no descriptor, or is closed
        return None


def _text(raw: Lossy | None, stream: TextIO) -> TextIO:
    """Return a text stream on ``raw`` that buffers like ``stream``; without ``raw``, ``stream`` itself."""
    if raw is None:
        return stream
    line, through = (getattr(stream, name, False) for name in ("line_buffering", "write_through"))
    buffer: Any = raw if through else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=line, write_through=through)
