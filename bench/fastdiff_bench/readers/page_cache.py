"""The kernel's page cache of single files: eviction and inspection, without root."""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fastdiff_bench import BenchError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def empty(files: Sequence[Path], limit_seconds: float = 3.0) -> float:
    """Evict files from the page cache; they must be on disk (``os.sync``).

    Pages that a process has mapped stay, and so do pages of a file system in memory.

    Args:
        files: non-empty files.
        limit_seconds: time to keep trying; pages that are being read stay at first.

    Returns:
        The share of the pages that stayed.

    Raises:
        BenchError: the kernel does not report it.
    """
    until = time.monotonic() + limit_seconds
    while True:
        _drop(files)
        left = cached_share(files)
        if left == 0.0 or time.monotonic() > until:
            return left
        time.sleep(0.1)


def _drop(files: Iterable[Path]) -> None:
    for file in files:
        with _open(file) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: Iterable[Path]) -> float:
    """Return the share of the pages of non-empty files in the page cache.

    Raises:
        BenchError: the kernel does not report it.
    """
    pages = held = 0
    for file in files:
        with _open(file) as descriptor, mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
            resident = np.zeros(-(-len(content) // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(content, np.uint8)
            if _LIBC.mincore(view.ctypes.data, len(content), resident.ctypes.data):
                raise BenchError(f"mincore of {file}: {os.strerror(ctypes.get_errno())}")
            del view  # otherwise the mapping could not be closed
            pages += len(resident)
            held += int((resident & 1).sum())
    return held / pages


@contextmanager
def _open(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
