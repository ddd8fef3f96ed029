"""Listing of folders: without hidden files and those of other programs, and by name in any Unicode form.

A Mac's archive has the names in another normal form (NFD) than keyboards and most programs write (NFC); both look alike
and differ in their bytes.
"""

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from fastdiff.data.images.kinds import TAKEN, ending_of
from fastdiff.errors import StorageError
from fastdiff.files import of_other_program
from fastdiff.sanitize import escape


def within_other_program(path: str) -> bool:
    """Return whether a part of a relative path is hidden or left by another program."""
    return any(of_other_program(part) for part in path.split("/") if part not in ("", ".", ".."))


def nfc(name: str) -> str:
    """Return a name in the normal form NFC, in which names are compared."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def walk_files(root: Path, ignored: list[str] | None = None) -> Iterator[str]:
    """Yield the paths of all files below a folder, unordered; follow links, but no cycles.

    Hidden files and folders, and those of other programs, are left out.

    Args:
        root: The folder.
        ignored: Gets the relative paths of what was left out.

    Raises:
        StorageError: A folder cannot be read.
    """
    folders: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]  # with the inodes of all parents
    while folders:
        prefix, above = folders.pop()
        status = (root / prefix).stat()
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            continue
        for entry in _entries(root / prefix):
            if of_other_program(entry.name):
                if ignored is not None:
                    ignored.append(prefix + entry.name)
            elif is_folder(entry):
                folders.append((f"{prefix}{entry.name}/", above | {identity}))
            else:
                yield prefix + entry.name


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link to itself


def visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder without hidden ones and those of other programs; StorageError: unreadable."""
    return [entry for entry in _entries(folder) if not of_other_program(entry.name)]


def unreadable(path: Path, error: OSError) -> StorageError:
    """Return the error for a file or folder that cannot be read."""
    where = escape(str(error.filename or path))
    return StorageError(f"cannot read {where}: {error.strerror}; check its permissions and its disk or network")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise unreadable(folder, error) from error


class Names:
    """Finds files below a folder by names that people and other programs wrote; reads each folder once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, dict[str, str]] = {}  # by folder: the names that are there, by their form for _find
        self._pictures: dict[str, dict[str, list[str]]] = {}  # by folder, for _stems

    def find(self, path: str) -> str:
        """Return the relative path as it is on the disk.

        Exact names come first, then those of another Unicode form; the backslash of Windows separates folders unless a
        file has it in its name. A path that is not found is returned unchanged.
        """
        if self._exists(path):
            return path
        for parts in (PurePosixPath(path).parts, PureWindowsPath(path).parts if "\\" in path else ()):
            found = self._find(parts)
            if found is not None:
                return found
        return path

    def picture(self, path: str) -> str:
        """As ``find``; a name without its ending, as kohya's scripts write it, finds the one picture that has it."""
        if (own := self.find(path)) != path or self._exists(path):
            return own
        folder, _, stem = path.rpartition("/")
        found = self._stems(folder).get(nfc(stem), [])
        return f"{folder}/{found[0]}".lstrip("/") if len(found) == 1 else path

    def like(self, path: str) -> str | None:
        """Return the name of a file that differs from a missing one only by the case of letters or its ending."""
        folder, _, name = path.rpartition("/")
        there = self._names(folder).values()
        stem = os.path.splitext(nfc(name).lower())[0]
        alike = [other for other in there if os.path.splitext(nfc(other).lower())[0] == stem]
        return min(alike, key=lambda other: (nfc(other).lower() != nfc(name).lower(), other), default=None)

    def _exists(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return self._names(folder).get(name) == name

    def _find(self, parts: tuple[str, ...]) -> str | None:
        found: list[str] = []
        for part in parts:
            here = self._names("/".join(found))
            name = here.get(part) or here.get(nfc(part))
            if name is None:
                return None
            found.append(name)
        return "/".join(found) or None

    def _names(self, folder: str) -> dict[str, str]:
        if folder not in self._folders:
            try:
                there = os.listdir(self._root / folder) if self._is_below(folder) else []
            except OSError:  # missing, or no folder; the reader of the file says why
                there = []
            self._folders[folder] = {nfc(name): name for name in there} | {name: name for name in there}
        return self._folders[folder]

    def _stems(self, folder: str) -> dict[str, list[str]]:
        """Return the pictures that are there, by their names without endings."""
        if folder not in self._pictures:
            self._pictures[folder] = {}
            for name in {*self._names(folder).values()}:
                if ending_of(name) in TAKEN:
                    self._pictures[folder].setdefault(os.path.splitext(nfc(name))[0], []).append(name)
        return self._pictures[folder]

    @staticmethod
    def _is_below(folder: str) -> bool:
        return not folder.startswith("/") and ".." not in folder.split("/") and "\0" not in folder
