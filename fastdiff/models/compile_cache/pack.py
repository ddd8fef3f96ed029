"""One file with the folder in which torch.compile and Triton keep their code.

A folder that all nodes see, usually by NFS, holds one file per network and machine instead of thousands of small ones
with locks. Its entries are code: it is read only if nobody else could have written it.
"""

import io
import json
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from fastdiff.files import make_parents, publish

LARGEST = 2**29
"""Bytes of a pack."""
_LARGEST_UNPACKED = 2**32
_GROUP = "__grp__"
"""First letters of Triton's lists of the files of a kernel, with their absolute paths."""
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, KeyError)
"""What ``zipfile`` and ``json`` raise for a file that is torn or was changed."""


class DamagedPackError(Exception):
    """A pack cannot be used; the message says why."""


def members(folder: Path) -> set[str]:
    """Return the names of the entries of a cache folder, without locks and files that are being written."""
    # Unlike rglob, walk passes over folders that another process removes meanwhile.
    paths = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
    found = (path.relative_to(folder) for path in paths if path.is_file() and not path.is_symlink())
    return {name.as_posix() for name in found if not any(map(_is_passing, name.parts))}


def _is_passing(part: str) -> bool:
    return part.startswith((".", "tmp")) or part.endswith((".lock", ".tmp")) or part in ("lock", "locks")


def write(path: Path, folder: Path, names: set[str], facts: Mapping[str, Any]) -> int:
    """Write a pack in place of an earlier one.

    Args:
        path: of the pack.
        folder: the cache folder.
        names: its entries.
        facts: what the code depends on.

    Returns:
        Its size in bytes.

    Raises:
        OSError: it cannot be written.
        ValueError: it would be larger than ``LARGEST``.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.comment = json.dumps(facts, sort_keys=True).encode()
        for name in sorted(names, key=_complete_first):
            archive.writestr(name, (folder / name).read_bytes())
            _require_small(content.tell())
    _require_small(content.tell())
    publish(path, content.getvalue(), 0o600, masked=False)
    return content.tell()


def _require_small(size: int) -> None:
    if size > LARGEST:
        raise ValueError(f"it would be larger than {LARGEST / 2**20:.0f} MiB")


def _complete_first(name: str) -> tuple[bool, str]:
    """Order Triton's lists behind the files that they name: what is listed must be there."""
    return PurePosixPath(name).name.startswith(_GROUP), name


def unpack(path: Path, folder: Path, facts: Mapping[str, Any]) -> tuple[set[str], int]:
    """Write the entries of a pack that a cache folder lacks, each at once.

    Others may use the folder meanwhile. What precedes an error stays, and is usable.

    Args:
        path: of the pack.
        folder: the cache folder, of this user alone.
        facts: what the code must depend on.

    Returns:
        The names of all entries, and how many of them were written.

    Raises:
        FileNotFoundError: there is no pack.
        DamagedPackError: it is torn, of another user or another machine, or too large.
        OSError: an entry cannot be written.
    """
    written = 0
    with _opened(path, facts) as archive:
        names = set(archive.namelist())
        for info in archive.infolist():
            name = PurePosixPath(info.filename)
            if name.is_absolute() or ".." in name.parts:
                raise DamagedPackError(f"it has an entry {info.filename!r}")
            target = folder / name
            if target.exists():
                continue
            content = archive.read(info)  # compares its crc32
            if name.name.startswith(_GROUP):
                content = _moved(content, target.parent)
            make_parents(target)
            publish(target, content, 0o600, masked=False, durable=False)
            written += 1
    return names, written


def _moved(group: bytes, folder: Path) -> bytes:
    """Return Triton's list of the files of a kernel for another folder."""
    names = json.loads(group)["child_paths"]
    return json.dumps({"child_paths": {name: str(folder / name) for name in names}}).encode()


@contextmanager
def _opened(path: Path, facts: Mapping[str, Any]) -> Iterator[zipfile.ZipFile]:
    """Open a pack of this user and of these facts; errors as ``unpack``."""
    try:
        with open(path, "rb", opener=_no_link) as file:
            _require_own(file)
            with zipfile.ZipFile(file) as archive:
                if json.loads(archive.comment) != facts:
                    raise DamagedPackError("it was compiled on another machine or for another network")
                if sum(info.file_size for info in archive.infolist()) > _LARGEST_UNPACKED:
                    raise DamagedPackError(f"its entries have more than {_LARGEST_UNPACKED / 2**30:.0f} GiB")
                yield archive
    except _DAMAGED as error:
        raise DamagedPackError(f"it is damaged ({error})") from None


def _no_link(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _require_own(file: BinaryIO) -> None:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise DamagedPackError("it is not a file")
    if status.st_uid != os.getuid():
        raise DamagedPackError(f"it is of user {status.st_uid}, expected one of yours")
    if status.st_mode & 0o022:
        raise DamagedPackError("others can write to it")
    if status.st_size > LARGEST:
        raise DamagedPackError(f"it is larger than {LARGEST / 2**20:.0f} MiB")
