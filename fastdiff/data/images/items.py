"""What every source of images gives, and the rules that all of them share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from fastdiff.sanitize import CONTROL

LARGEST_IMAGE = 256 << 20
"""Bytes of an image file; more is refused before it is read."""
LARGEST_TEXT = 10 << 20
"""Bytes of a text or JSON file beside an image."""
LONGEST_CAPTION = 100_000
"""Bytes in UTF-8; no text encoder reads more than a few hundred."""
IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp"})
ClassesFrom = Literal["auto", "folder", "prefix", "none"]
"""What says of which class an image is; ``ImageFolder`` has what each of them means."""


@dataclass(frozen=True, slots=True)
class ImageItem:
    """One image as it is stored, with what is known about it."""

    key: str
    """Letters, digits, ``_`` and ``-``; unique in the source."""
    name: str
    """What messages call it: a path, or ``tar!member``."""
    image: bytes
    """The file."""
    captions: tuple[str, ...] = ()
    label: int | None = None


@dataclass(frozen=True, slots=True)
class BadItem:
    """One image that the source lists and cannot give."""

    key: str
    name: str
    reason: str


class ImageSource(Protocol):
    """Images in an order that is the same each time, in units that are read one after the other."""

    @property
    def name(self) -> str:
        """What the provenance says; without secrets."""

    @property
    def classes(self) -> int | None:
        """Number of classes; None: the images have none."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the classes are called, in the order of their numbers; empty: nobody knows."""

    @property
    def captioned(self) -> bool:
        """Whether the images have captions."""

    @property
    def units(self) -> int:
        """Number of units."""

    @property
    def digest(self) -> str:
        """Sha256 of what the source lists: another one means other units."""

    def items(self, unit: int) -> Iterator[ImageItem | BadItem]:
        """The images of one unit, always the same.

        Raises:
            DataError: A file that holds many images is damaged; what came before the damage was given.
            StorageError: The storage cannot be read.
        """

    def most_captions(self, unit: int) -> int:
        """How many captions the image of a unit with the most of them has, 0 without captions; images are not read.

        Raises:
            DataError: As ``items``.
            StorageError: As there.
        """

    def __len__(self) -> int:
        """Number of images; ConfigError where it is not known without reading all of them."""

    def item(self, index: int) -> ImageItem | BadItem:
        """One image by number, in the order of the units; ConfigError where the source cannot seek."""


class BadCaptionError(Exception):
    """What stands where a caption should be is none; the text says why."""


def clean_captions(value: object) -> tuple[str, ...]:
    """The captions in a field of metadata: a text, or several.

    Control characters become spaces, and spaces at both ends go.

    Raises:
        BadCaptionError: It is something else, or too long.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadCaptionError(f"its caption is {str(value)[:80]!r}, expected a text or a list of texts")
    return tuple(map(_clean, texts))


def _clean(text: str) -> str:
    length = len(text.encode("utf-8", "surrogatepass"))
    if length > LONGEST_CAPTION:
        raise BadCaptionError(f"its caption has {length} bytes; at most {LONGEST_CAPTION}")
    return CONTROL.sub(" ", text).strip()


def digest_of(kind: str, facts: Iterable[object]) -> str:
    """Sha256 over the kind of a source and what it lists, each fact one line of JSON."""
    digest = hashlib.sha256(kind.encode())
    for fact in facts:
        digest.update(b"\n" + json.dumps(fact, sort_keys=True).encode())
    return digest.hexdigest()


def runs(samples: int, per_unit: int) -> int:
    """Number of units when ``samples`` numbers are cut in runs of ``per_unit``."""
    return -(-samples // per_unit)
