"""Files that are there completely or not at all, also after a power cut."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

# Other encodes of the same folder, on this machine or another one, have other names for what they are writing.
_TOKEN = secrets.token_hex(4)


def temporary(path: Path) -> Path:
    """Name of ``path`` while this process writes it; no other process has the same."""
    return path.with_name(f"{path.name}.{os.getpid()}-{_TOKEN}.tmp")


def publish(path: Path, content: bytes) -> None:
    """Write a small file under a temporary name, fsync, rename, fsync the folder; raises OSError."""
    with temporary(path).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rename(temporary(path), path)


def rename(source: Path, target: Path) -> None:
    """Rename an fsynced file within its folder and make the new name durable."""
    source.replace(target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
