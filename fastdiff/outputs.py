"""Files and folders that a command writes for its user, under one rule: nothing that is there is lost without a word.

Before the work, a command asks whether it can write its result (``require_output``), which says that an earlier file
will be replaced, and whether a folder is new, empty or its own (``require_own_folder``).
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from fastdiff.console import log
from fastdiff.errors import ConfigError
from fastdiff.files import make_parents, of_other_program, publish, temporary
from fastdiff.sanitize import escape

_SHOWN = 3
"""Names in a message."""


def require_own_folder(
    flag: str, folder: Path, is_own: Callable[[str], bool], is_beside: Callable[[str], bool] = of_other_program
) -> None:
    """Refuse a folder of someone else: one that has only entries of others.

    Args:
        flag: of the folder, for the message.
        folder: need not exist.
        is_own: whether the command writes an entry of this name.
        is_beside: whether an entry of this name does not count, as hidden ones and those of systems.

    Raises:
        ConfigError: the folder is of someone else.
        OSError: it cannot be read.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    found = [escape(name) for name in names if not is_beside(name)]
    if found and not any(map(is_own, names)):
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(
            f"{flag} {escape(str(folder))}: the folder holds nothing of this command, but {', '.join(found[:_SHOWN])}"
            f"{more}; name a new or an empty folder"
        )


def write_output(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that the user named, and its folder if missing.

    An earlier file stays until the new one is complete. A link is followed; a pipe or a device is written to.

    Args:
        path: of the file.
        content: of the file.
        mode: permissions of a new file, less those of the umask. An earlier file keeps its own as far as ``mode`` has
            them: content that is private stays so.

    Raises:
        OSError: with the path.
    """
    earlier = _mode_of_output(path)
    if earlier is None:
        publish(path.resolve(), content, mode)
    elif stat.S_ISREG(earlier):
        publish(path.resolve(), content, mode & earlier, masked=False)
    else:
        try:
            path.write_bytes(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None


def require_output(path: Path) -> None:
    """Fail before the work if its result could not be written to ``path``, and say if it replaces an earlier file.

    The missing folders above it are made. OSError: with the path.
    """
    earlier = _mode_of_output(path)
    if earlier is None or stat.S_ISREG(earlier):
        trial = temporary(path.resolve())
        try:
            os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            trial.unlink()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    if earlier is not None and stat.S_ISREG(earlier):
        log.info(f"{escape(str(path))} exists and will be replaced")


def _mode_of_output(path: Path) -> int | None:
    """Return the mode of the file at ``path``; if there is none, make the missing folders above it."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        make_parents(path)
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return mode
