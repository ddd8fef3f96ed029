"""Pieces of work in a shared folder, each of them claimed by at most one living process.

A claim is the lock of a file (``flock``), which ends with its process. A rank works on its own pieces first and then on
those that no living process holds, so the work ends whatever the launcher said about other ranks: ranks that were
killed, that never started or that are late lose nothing and harm nobody. Several machines need a file system that locks
files across them.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from fastdiff.files import lock, open_lock_in


def in_turn(rank: int, ranks: int, count: int) -> Iterator[int]:
    """Yield the pieces ``rank``, ``rank + ranks``, ..., and then those of the other ranks from the last one on.

    Their owners begin with the first one, so both rarely meet at a piece.
    """
    yield from range(rank, count, ranks)
    yield from (piece for piece in reversed(range(count)) if piece % ranks != rank)


class Claims:
    """The claims of this process.

    Args:
        folder: Folder of the locks; a process that has finished all work may remove it.
        name: The lock of piece 12 is ``NAME-000012.lock``.

    Raises:
        OSError: From every method: the file cannot be opened.
        StorageError: From every method: the file system cannot lock files.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._held: dict[int, int] = {}

    def take(self, piece: int) -> bool:
        """Claim a piece; False: another process holds it."""
        descriptor = self._open(piece)
        try:
            lock(descriptor, self._folder)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        if not os.fstat(descriptor).st_nlink:  # the file was removed before the lock, which another one may hold anew
            os.close(descriptor)
            return self.take(piece)
        self._held[piece] = descriptor
        return True

    def release(self, piece: int) -> None:
        """Give a claimed piece back."""
        os.close(self._held.pop(piece))

    def release_all(self) -> None:
        """Give all back."""
        for piece in list(self._held):
            self.release(piece)

    def wait(self, piece: int) -> None:
        """Wait until no other process holds a piece."""
        descriptor = self._open(piece)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        finally:
            os.close(descriptor)

    def _open(self, piece: int) -> int:
        return open_lock_in(self._folder, f"{self._name}-{piece:06d}.lock")
