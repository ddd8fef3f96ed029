"""Output that nobody reads any more, as after the death of a ``tee`` or of an ssh, must not end a run unsaved."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_CLOSED = (errno.EPIPE, errno.EIO)
"""A pipe without a reader; a terminal that hung up."""


class _Tolerant:
    """A text stream that goes nowhere once nobody can read it; everything else is that of ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or discard."""
        try:
            return self._stream.write(text)
        except OSError as error:
            _discard(self._stream, error)
            return len(text)

    def flush(self) -> None:
        """Flush, or discard what waits."""
        try:
            self._stream.flush()
        except OSError as error:
            _discard(self._stream, error)
            self._stream.flush()


def _discard(stream: TextIO, error: OSError) -> None:
    """Let the descriptor of a stream lead nowhere, also for code in C and for children."""
    if error.errno not in _CLOSED:
        raise error
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


@contextmanager
def ignoring_closed_output() -> Iterator[None]:
    """Within it, writes to a standard output or error that nobody reads any more are dropped instead of raising.

    What waits in their buffers is flushed at the end, so that the interpreter's last flush finds nothing to fail on.
    """
    before = sys.stdout, sys.stderr
    tolerant = [_Tolerant(stream) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in tolerant)
    try:
        yield
    finally:
        for stream in tolerant:
            stream.flush()
        sys.stdout, sys.stderr = before


def quieten() -> None:
    """Call once per process, after DeepSpeed is imported, which sets the level of its logger."""
    # DeepSpeed: dozens of lines of its own settings; what matters of them stands in run.json.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # bitsandbytes: its 4-bit inference kernels for CPUs, which nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # torch.distributed: names that DeepSpeed still calls, once per step.
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    # diffusers: the multistep solver hands a tensor to numpy.
    warnings.filterwarnings("ignore", message=".*__array__ implementation.*", category=DeprecationWarning)
