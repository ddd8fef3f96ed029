"""Reference pictures of an edited picture: which files they are, and their pixels.

A reference is resized and cropped as a picture of its own, but to the size of the picture that refers to it: the square
of the data set, or the bucket of that picture.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from fastdiff.data.images.decode import BadImage, Decoded, Decoder, ImageTransform
from fastdiff.data.images.geometry import Size
from fastdiff.data.images.items import BadItem, ImageItem
from fastdiff.data.images.listing import Listing
from fastdiff.data.images.stream import Chunk
from fastdiff.data.images.walk import nfc
from fastdiff.data.selection import Tally
from fastdiff.errors import ConfigError, DataError
from fastdiff.sanitize import escape

_NUMBERED = re.compile(r"(.+)_(\d{1,4})", re.DOTALL)


class ReferenceFiles:
    """The pictures in a folder of references, by the pictures that refer to them.

    The references of ``a/b.jpg`` are ``a/b.png``, ``a/b_1.png``, ``a/b_2.png`` and so on in that folder, in the order
    of their numbers, or, if there is none of these, ``b.png`` and so on; with the ending of any kind that is read.

    Args:
        folder: The folder.
        images: Relative paths of the pictures.

    Raises:
        ConfigError: There is no such folder.
        DataError: Two files are the same reference of a picture.
        StorageError: The folder cannot be read.
    """

    def __init__(self, folder: Path, images: Sequence[str]) -> None:
        if not folder.is_dir():
            raise ConfigError(f"--references {escape(str(folder))}: no such folder; expected a folder of pictures")
        self.folder = folder
        self._listing = Listing.below(folder)
        self._named = {_stem(image) for image in images} | {os.path.basename(_stem(image)) for image in images}
        self._of: dict[str, dict[int, str]] = {}
        for file in self._listing.images:
            stem, number = self._place(_stem(file))
            same = self._of.setdefault(stem, {}).setdefault(number, file)
            if same != file:
                raise DataError(f"{escape(str(folder))} holds {escape(same)} and {escape(file)}; keep one of them")
        self._used: set[str] = set()

    def of(self, image: str) -> tuple[str, ...]:
        """Return the relative paths of the references of a picture, in their order; empty: it has none."""
        stem = _stem(image)
        found = self._of.get(stem) or self._of.get(os.path.basename(stem)) or {}
        files = tuple(file for _, file in sorted(found.items()))
        self._used.update(files)
        return files

    def count(self, noted: Tally) -> None:
        """Count what the folder holds besides the references that were asked for."""
        for file in self._listing.images:
            if file not in self._used:
                noted.add("references of no picture, not read", file)
        for file in self._listing.others:
            noted.add("references of a kind that is not read (convert to PNG)", file)
        for file in self._listing.files:
            noted.add("other files in the folder of references", file)

    def _place(self, stem: str) -> tuple[str, int]:
        """Return the stem of the picture that a file belongs to, and its number; a picture may end with a number."""
        numbered = _NUMBERED.fullmatch(stem)
        return (stem, -1) if stem in self._named or numbered is None else (numbered[1], int(numbered[2]))


class ReferenceDecoder:
    """Adds the pixels of their references to decoded pictures; not thread-safe.

    Args:
        transform: Resize and crop of the pictures.
        open_with: Opens a decoder with a resize and crop.
    """

    def __init__(self, transform: ImageTransform, open_with: Callable[[ImageTransform], Decoder]) -> None:
        self._transform, self._open_with = transform, open_with
        self._decoders: dict[Size, Decoder] = {}

    def add(self, chunk: Chunk) -> Chunk:
        """Return the pictures of a chunk with their references; one with a bad reference is bad."""
        files: dict[Size, list[bytes]] = {}
        for item, decoded in chunk.images:
            if isinstance(item, ImageItem) and isinstance(decoded, Decoded):
                files.setdefault(_size(decoded), []).extend(item.references)
        found = {size: iter(self._decoder(size).decode(each)) for size, each in files.items()}
        images: list[tuple[ImageItem | BadItem, Decoded | BadImage]] = []
        for item, decoded in chunk.images:
            if isinstance(item, ImageItem) and isinstance(decoded, Decoded):
                decoded = _joined(decoded, list(islice(found[_size(decoded)], len(item.references))))
            images.append((item, decoded))
        return replace(chunk, images=images)

    def _decoder(self, size: Size) -> Decoder:
        if size not in self._decoders:
            one = replace(self._transform, buckets=(size,)) if self._transform.buckets else self._transform
            self._decoders[size] = self._open_with(one)
        return self._decoders[size]


def _size(decoded: Decoded) -> Size:
    return decoded.pixels.shape[0], decoded.pixels.shape[1]


def _joined(decoded: Decoded, references: Sequence[Decoded | BadImage]) -> Decoded | BadImage:
    good = [each.pixels for each in references if isinstance(each, Decoded)]
    bad = [
        f"its reference {number} {each.reason}"
        for number, each in enumerate(references, 1)
        if isinstance(each, BadImage)
    ]
    return BadImage(bad[0]) if bad else replace(decoded, references=tuple(good))


def _stem(path: str) -> str:
    return nfc(os.path.splitext(path)[0])
