"""The pictures below a folder, and all that is there beside them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fastdiff.data.images.kinds import Kind, head_of, kind_of_file, kind_of_name, not_read
from fastdiff.data.images.walk import visible, walk_files
from fastdiff.data.selection import Tally


@dataclass
class Listing:
    """Files below a folder, by relative path and sorted.

    Attributes:
        images: Pictures of kinds that are read.
        others: Pictures of other kinds.
        files: Files that look like no picture.
        ignored: Hidden files and folders, and those of other programs; a folder without its content.
    """

    root: Path
    images: list[str] = field(default_factory=list)
    others: dict[str, Kind] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @classmethod
    def below(cls, root: Path) -> Self:
        """List all files below a folder; StorageError if it cannot be read."""
        ignored: list[str] = []
        found = cls(root)
        found._take(walk_files(root, ignored))
        found.ignored = sorted(ignored)
        return found

    @classmethod
    def beside(cls, root: Path, paths: Iterable[str]) -> Self:
        """List only the files in the folders of these paths; a missing folder, or one outside, has none."""
        found = cls(root)
        for folder in sorted({os.path.dirname(path) for path in paths}):
            if (root / folder).is_dir() and not folder.startswith("/") and ".." not in folder.split("/"):
                prefix = f"{folder}/" if folder else ""
                found._take(prefix + entry.name for entry in visible(root / folder) if not entry.is_dir())
        return found

    def _take(self, files: Iterable[str]) -> None:
        for file in sorted(files):
            kind = kind_of_file(file, lambda file=file: head_of(os.path.join(self.root, file)))  # type: ignore[misc]
            if kind is None:
                self.files.append(file)
            elif kind.taken:
                self.images.append(file)
            else:
                self.others[file] = kind

    def count(self, left_out: Tally, noted: Tally) -> None:
        """Count the pictures of other kinds, hidden ones, and what else was ignored."""
        for file, kind in self.others.items():
            left_out.add(not_read(kind), file)
        for path in self.ignored:
            name = os.path.basename(path)
            if kind_of_name(name) and not name.startswith("._"):
                left_out.add("hidden", path)
            else:
                noted.add("hidden, or of other programs: ignored", path)

    def described_others(self) -> str:
        """Describe the pictures of other kinds, for an error; empty without any."""
        tally = Tally()
        for file, kind in self.others.items():
            tally.add(not_read(kind), file)
        return "; ".join(each.of_pictures for each in tally.counted())
