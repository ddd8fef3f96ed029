"""Folders of this user alone, for files that another user must neither write nor replace."""

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

OWN_CACHE = "FASTDIFF_CACHE"
"""Environment variable: the folder of what later runs use again; XDG_CACHE_HOME/fastdiff unless given."""


def private(folder: Path) -> Path:
    """Make a folder of mode 0700, with missing folders above it, and return it.

    Raises:
        PermissionError: it is a link or a file, of another user, open to others, or others can replace it.
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    above, status = folder.parent.stat(), folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder}: a link or a file, expected a folder; remove it")
    if status.st_uid != os.getuid():
        raise PermissionError(f"{folder}: of user {status.st_uid}, expected one of yours")
    if status.st_mode & 0o777 != 0o700:  # setgid, which folders of a project hand down, opens nothing
        raise PermissionError(f"{folder}: open to others; chmod 700 {folder}")
    if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{folder}: others can replace it; chmod go-w {folder.parent}")
    return folder


def local_folder() -> Path:
    """Return a folder on this node, for files between its processes; OSError as ``private``."""
    return private(Path(tempfile.gettempdir()) / local_name())


def local_name() -> str:
    """Return the name of the user's folder on a node."""
    return f"fastdiff-{os.getuid()}"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what later runs use again, usually in a home directory that all nodes see.

    Raises:
        FileNotFoundError: the environment names none, and the user has no home directory.
    """
    try:
        if given := environment.get(OWN_CACHE):
            return Path(given).expanduser()
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastdiff"
    except RuntimeError:
        raise FileNotFoundError(f"there is no home directory; set {OWN_CACHE} to a folder") from None
