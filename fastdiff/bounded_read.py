"""Read a whole small file, unless it is none: a foreign file may be of any size, a pipe or a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a file.

    Args:
        path: Of the file; links are followed.
        most: Bytes that it may have.

    Raises:
        ValueError: It is larger, or grows while it is read, or is no regular file.
        OSError: It cannot be read.
    """
    # A pipe that nobody writes to would be waited for when it is opened.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size} bytes, at most {most} are read")
        size = status.st_size or most  # files of the kernel say that they are empty
        content = file.read(size + 1)
    if len(content) > size:
        raise ValueError(f"it has more than {size} bytes, and grows or is larger than it says")
    return content
