"""The console of a process: one logger, and streams that survive the end of whoever reads them.

``log`` is for everything that is said while something runs: on standard error, with the time, the rank if there are
several, and the level, between two redraws of a progress bar. Results of commands are printed plainly on standard
output, and the error that ends a command by ``errors.report``.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, cast

from tqdm import tqdm

_CLOSED = (errno.EPIPE, errno.EIO)
"""A pipe without a reader; a terminal that hung up."""
_NAME = "fastdiff"


def write_line(text: str) -> None:
    """Write a line to standard error, not into a progress bar.

    A bar of this process is drawn again below it. The bar of a run is that of rank 0: other ranks, which cannot draw
    it, overwrite its line, and rank 0 draws it below at its next step.
    """
    if os.environ.get("RANK", "0") != "0":
        text = ("\r\x1b[K" if sys.stderr.isatty() else "\r") + text
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record))
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        record.rank = f" [rank {os.environ.get('RANK', '0')}]" if several else ""
        return super().format(record)


class _Once(logging.Filter):
    """Drops a warning that was given before, word by word, and warnings of libraries on all ranks of a node but one."""

    def __init__(self) -> None:
        super().__init__()
        self.given: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        foreign = record.name.partition(".")[0] != _NAME
        if foreign and record.levelno < logging.ERROR and os.environ.get("LOCAL_RANK", "0") != "0":
            return False
        message = record.getMessage()
        new = message not in self.given
        self.given.add(message)
        return new


def _is_news(record: logging.LogRecord) -> bool:
    """False for what every rank of DeepSpeed says of its accelerator on import; a run says it in its first line."""
    return record.funcName != "get_accelerator" and not record.getMessage().startswith("Setting ds_accelerator")


once = _Once()
"""What was said; for tests, which have several runs in one process."""
_handler = _Handler()
_handler.setFormatter(_Formatter("%(asctime)s%(rank)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
_handler.addFilter(once)
log = logging.getLogger(_NAME)
"""For everything that is said while something runs."""
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(_handler)
logging.getLogger("DeepSpeed").addFilter(_is_news)  # before DeepSpeed is imported


def quieten() -> None:
    """Silence third-party warnings that users cannot act on, and log the others; once per process, after all imports.

    DeepSpeed, on import, gives its logger a handler and a level.
    """
    # DeepSpeed: dozens of lines of its own settings; what matters of them stands in run.json.
    deepspeed = logging.getLogger("DeepSpeed")
    deepspeed.setLevel(logging.WARNING)
    deepspeed.handlers.clear()
    deepspeed.propagate = True
    # bitsandbytes: its 4-bit inference kernels for CPUs, which nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # torch.distributed: names that DeepSpeed still calls, once per step.
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    # diffusers: the multistep solver hands a tensor to numpy.
    warnings.filterwarnings("ignore", message=".*__array__ implementation.*", category=DeprecationWarning)
    if _handler not in logging.getLogger().handlers:
        logging.getLogger().addHandler(_handler)
    warnings.formatwarning = _one_line
    logging.captureWarnings(True)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{message} ({category.__name__} of {filename}:{lineno})"


@contextmanager
def without_prints() -> Iterator[None]:
    """Within it, what Python prints to standard output is dropped: of libraries that print on every rank."""
    with redirect_stdout(io.StringIO()):
        yield


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
    """Survive a closed standard output or error (EPIPE, EIO), as after the death of a ``tee`` or of an ssh.

    Within it, such writes are dropped instead of raising. What waits in the buffers is flushed at the end, so that the
    interpreter's last flush finds nothing to fail on.
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
