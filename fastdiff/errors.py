"""What can go wrong, one class per exit code.

A message says what was given, what was expected and what to do. ``train.py`` and ``cli.py`` print it without a
traceback and exit with ``exit_code``; anything else is a bug in fastdiff and keeps its traceback. A supervisor exits
with 69 when a rank or a node stops answering (``cluster.outcome``).
"""

from __future__ import annotations

import errno
import os
import re

from fastdiff.console import write_line
from fastdiff.exit_message import on_first_node, say_once
from fastdiff.sanitize import escape

_STORAGE_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.ESTALE,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
)
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|ncclRemoteError|remote process exited", re.IGNORECASE
)
"""In what gloo and NCCL say when the rank at the other end is gone."""


class FastdiffError(Exception):
    """Base of every error that a user can cause or must know about."""

    exit_code = 70

    def __init__(self, message: str, *, everywhere: bool | None = None) -> None:
        super().__init__(message)
        self.everywhere = self.usually_everywhere if everywhere is None else everywhere
        """True when every rank raises it: the message then names none of them."""

    usually_everywhere = False


class ConfigError(FastdiffError):
    """The command line, a configuration file or the run folder does not fit."""

    exit_code = 2
    usually_everywhere = True


class DataError(FastdiffError):
    """A shard, an index or a sample is missing, damaged or of another shape than declared."""

    exit_code = 65


class DivergedError(FastdiffError):
    """The training produced non-finite numbers, or spikes of the loss, and cannot go on."""

    exit_code = 70
    usually_everywhere = True


class StorageError(FastdiffError):
    """A file could not be written or read back: no space, no permission, input/output error."""

    exit_code = 74


class Preempted(FastdiffError):
    """The run was asked to stop and has saved; the same command goes on."""

    exit_code = 75
    usually_everywhere = True


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def report(error: FastdiffError) -> int:
    """Print ``error``, unless another rank of this job has printed its own, and return the exit code of that message.

    Of an error that all ranks have, ranks on other nodes than the first say nothing (``exit_message``).
    """
    rank, several = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1") != "1"
    if error.everywhere and not on_first_node():
        return error.exit_code
    where = f" (rank {rank})" if several and not error.everywhere else ""
    message = "\n".join(map(escape, str(error).split("\n")))  # it may hold names from foreign files
    return say_once(error.exit_code, lambda: write_line(f"fastdiff: error{where}: {message}"))


def is_lost_connection(message: str) -> bool:
    """Whether it is what a rank says that lost another one, and not of a failure of its own."""
    return _LOST_CONNECTION.search(message) is not None


def is_of_storage(error: Exception) -> bool:
    """Whether it is a file system's error, and not that of a lost connection or a dead process."""
    return isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS


def as_storage_error(error: OSError) -> StorageError:
    """Return a file system's error as ours; raise anything else again."""
    if not is_of_storage(error):
        raise error
    return StorageError(f"{error.filename or 'storage'}: {error.strerror}")
