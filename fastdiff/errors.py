"""Errors of fastdiff, one class per exit code.

A message names the given value, the expected one and the remedy. ``train.py`` and ``cli/main.py`` print it without a
traceback and exit with ``exit_code``; any other exception is a bug in fastdiff and keeps its traceback. A supervisor
exits with 69 when a rank or a node stops answering (``cluster.supervisor.outcome``).
"""

import errno
import os
import re
import sys
import traceback

from fastdiff import process_limits
from fastdiff.console import log, write_line
from fastdiff.exit_message import note_message, on_first_node, say_once
from fastdiff.sanitize import escape, is_utf8, message

_REMEDIES = {
    errno.ENOSPC: "free some space, or choose a folder on another disk",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.EFBIG: "raise the limit of the file size (ulimit -f), or choose another file system",
    errno.EIO: "check the disk and the system's log (dmesg)",
    errno.ESTALE: "its server has replaced it; run the same command again",
    errno.EROFS: "its file system is mounted read-only; choose another folder",
    errno.EACCES: "check the permissions of it and of its folders",
    errno.EPERM: "check the permissions of it and of its folders",
    errno.ENOENT: "check the path",
    errno.EEXIST: "rename it, or choose another name",
    errno.ENOTEMPTY: "rename it, or choose another name",
    errno.ENOTDIR: "a file stands where its path needs a folder; choose another path",
    errno.EISDIR: "it is a folder, expected a file; choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "it is a link, which is not followed, or its path goes in a circle; remove the link",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
}
"""What to do about a file system error."""
_LONGEST_PATH = 800
_NOT_OF_STORAGE = (ConnectionError, ChildProcessError, ProcessLookupError)
_LOST_CONNECTION = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|got 0 bytes|broken pipe|ncclRemoteError|remote process exited",
    re.IGNORECASE,
)
"""Matches messages of gloo and NCCL about a lost connection to another rank."""


class FastdiffError(Exception):
    """Base class of every error that a user can cause or must know about."""

    exit_code = 70

    def __init__(self, message: str, *, everywhere: bool | None = None) -> None:
        super().__init__(message)
        self.everywhere = self.usually_everywhere if everywhere is None else everywhere
        """True when every rank raises it; the message then names no rank."""

    usually_everywhere = False


class ConfigError(FastdiffError):
    """The command line, a configuration file or the run folder does not fit."""

    exit_code = 2
    usually_everywhere = True


class PluginError(FastdiffError):
    """Code of the user failed during the run."""

    exit_code = 1


class DataError(FastdiffError):
    """A shard, an index or a sample is missing, damaged or of another shape than declared."""

    exit_code = 65


class DivergedError(FastdiffError):
    """The training produced non-finite numbers or loss spikes, and cannot continue."""

    exit_code = 70
    usually_everywhere = True


class NoMemoryError(FastdiffError):
    """The memory of a rank, on its GPU or its host, does not suffice for a step."""

    exit_code = 70


class ProcessLimitError(FastdiffError):
    """No more threads or processes may be started."""

    exit_code = 71


class StorageError(FastdiffError):
    """A file could not be written or read back: no space, no permission, input/output error."""

    exit_code = 74


class OutOfMemoryRestart(FastdiffError):
    """The memory of a rank does not suffice; the same command goes on with a smaller micro-batch.

    Args:
        message: what ran out of memory, and how the run goes on.
        micro: samples per rank and forward pass of the next start.
    """

    exit_code = 75

    def __init__(self, message: str, *, micro: int = 0) -> None:  # the default is for pickle
        super().__init__(message)
        self.micro = micro


class Preempted(FastdiffError):
    """The run was asked to stop and has saved; the same command resumes it."""

    exit_code = 75
    usually_everywhere = True


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


def require_utf8(name: str, text: str) -> None:
    """Raise ConfigError if a text cannot be written as UTF-8, as records of runs and data sets are.

    Args:
        name: of the flag, with its hyphens; empty: the text stands for itself.
        text: as given; an argument in another encoding has unpaired surrogates.
    """
    given = f"{name} {escape(text)}".lstrip()
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":
        require(is_utf8(text), f"{given}: Python reads names as {encoding} here; set LC_ALL=C.UTF-8 or PYTHONUTF8=1")
    remedy = "rename the file or folder, or give the text in UTF-8"
    require(is_utf8(text), f"{given}: no UTF-8, in which runs and data sets record names; {remedy}")


def report(error: FastdiffError) -> int:
    """Print ``error`` unless another rank of this job has printed its own; return the exit code of the printed message.

    An error of all ranks is printed on the first node only (``exit_message``).
    """
    if error.everywhere and not on_first_node():
        return error.exit_code
    log.debug("the error in full", exc_info=error)
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    where = f" (rank {os.environ.get('RANK', '0')})" if several and not error.everywhere else ""
    # It may contain names from untrusted files. Before it is cut off: a part of an address is not recognised as one.
    text = "\n".join(map(escape, message(str(error)).split("\n")))
    who = "fastdiff" if isinstance(error, (Preempted, OutOfMemoryRestart)) else "fastdiff: error"  # the run goes on

    def say() -> None:
        write_line(f"{who}{where}: {text}")
        note_message()

    return say_once(error.exit_code, say)


def is_lost_connection(message: str) -> bool:
    """Return whether the message reports a lost connection to another rank, rather than a failure of this one."""
    return _LOST_CONNECTION.search(message) is not None


def explained(error: Exception) -> Exception:
    """Return the error with its cause and remedy for one of the file system or of a limit of threads.

    Any other is returned as it is. An error of a lost connection or of a dead process is none of the file system.
    """
    if process_limits.is_reached(error):
        return ProcessLimitError(
            f"no more threads or processes may be started ({process_limits.limits()}); raise the limit, end other "
            "processes of this user or container, or set OMP_NUM_THREADS to fewer threads"
        )
    if not isinstance(error, OSError) or isinstance(error, _NOT_OF_STORAGE):
        return error
    is_of_storage = error.errno in _REMEDIES or (error.errno is not None and error.filename is not None)
    return storage_error(error) if is_of_storage else error


def storage_error(error: OSError) -> StorageError:
    """Return the StorageError of a file system error: its paths, its cause and a remedy."""
    names = " -> ".join(_shortened(os.fsdecode(n)) for n in (error.filename, error.filename2) if n is not None)
    return StorageError(f"{names or 'storage'}: {error.strerror or error}; {remedy(error)}")


def _shortened(path: str) -> str:
    """Return a path that leaves room for the cause; sanitized first, because a part of an address is no address."""
    shown = message(path)
    return shown if len(shown) <= _LONGEST_PATH else f"{shown[:_LONGEST_PATH]} ..."


def remedy(error: OSError) -> str:
    """Return what to do about a file system error."""
    return _REMEDIES.get(error.errno or 0, "check the path and its file system")


def report_any(error: Exception) -> int:
    """Print an error of a command, with its traceback if it is a bug, and return the exit code."""
    error = explained(error)
    if isinstance(error, FastdiffError):
        return report(error)
    write_line("".join(traceback.format_exception(error)).rstrip())
    return 1
