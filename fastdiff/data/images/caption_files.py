"""Caption files beside images: which one belongs to which image, and which belong to none.

``a.png`` takes the first that is there of ``a.txt``, ``a.caption``, ``a.png.txt`` and ``a.png.caption``; the endings in
any case, the rest in any Unicode form.
"""

import os
import re
from collections.abc import Sequence

from fastdiff.data.images.kinds import ending_of
from fastdiff.data.images.walk import nfc

ENDINGS = ("txt", "caption")
"""Endings of caption files, in the order in which one of several is taken."""
_ALIKE = frozenset({*ENDINGS, "captions", "text", "tags", "cap", "json"})
"""Endings of files beside images that hold captions in other programs."""


class CaptionFiles:
    """The caption files among the files of a folder; ``shared``, sorted, are those of several images.

    Args:
        files: Of the folder.
        images: Of the folder.
        endings: Of caption files, the first that is there counts.
    """

    def __init__(self, files: Sequence[str], images: Sequence[str], endings: tuple[str, ...] = ENDINGS) -> None:
        self._endings = endings
        by_name: dict[tuple[str, str], str] = {}  # by path without ending, and ending
        for file in sorted(files, key=lambda name: (not name.endswith(endings), name)):  # a.txt before a.TXT
            if (ending := ending_of(file)) in endings:
                by_name.setdefault((nfc(os.path.splitext(file)[0]), ending), file)
        self._of: dict[str, str] = {}
        users: dict[str, list[str]] = {}
        for image in images:
            if found := next((by_name[name] for name in _wanted(nfc(image), endings) if name in by_name), None):
                self._of[image] = found
                users.setdefault(found, []).append(image)
        self._users = users
        self._stems = {nfc(stem) for image in images for stem in (os.path.splitext(image)[0], image)}
        self.shared = [file for file in files if len(users.get(file, ())) > 1]

    def __bool__(self) -> bool:
        """Return whether any image has one."""
        return bool(self._of)

    def of(self, image: str) -> str | None:
        """Return the caption file of an image; None if it has none."""
        return self._of.get(image)

    @property
    def read(self) -> list[str]:
        """The caption files of images."""
        return list(self._users)

    def why_unread(self, file: str) -> str:
        """Return the reason for which a file that looks like captions is not read."""
        beside = nfc(os.path.splitext(file)[0]) in self._stems
        if ending_of(file) not in self._endings:
            known = " or ".join(f"NAME.{ending}" for ending in self._endings)
            return f"files that may hold captions, not read (a caption file is {known})"
        return f"caption files {'beside another one of their picture' if beside else 'of no picture'}, not read"


def endings_of(extension: str) -> tuple[str, ...]:
    """Return the endings of caption files for a given one with its dot; empty: the usual ones."""
    return (extension[1:].lower(),) if extension else ENDINGS


def expected(image: str, endings: tuple[str, ...] = ENDINGS) -> str:
    """Return the names under which the caption file of an image is looked for, for messages."""
    name = os.path.basename(image)
    stem = os.path.splitext(name)[0]
    return f"{', '.join(f'{stem}.{ending}' for ending in endings)} or {name}.{endings[0]}"


def captions_in(text: str) -> list[str]:
    """Return the non-empty lines of a caption file, each a caption; one empty caption if there are none."""
    return [line for line in re.split(r"\r\n|\r|\n", text) if line.strip()] or [""]


def is_like_captions(file: str) -> bool:
    """Return whether a file may hold captions, as fastdiff or another program writes them."""
    return ending_of(file) in _ALIKE


def _wanted(image: str, endings: tuple[str, ...]) -> list[tuple[str, str]]:
    stems = (os.path.splitext(image)[0], image)
    return [(stem, ending) for stem in stems for ending in endings]
