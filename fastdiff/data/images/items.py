"""The interface of image sources, their items, and rules common to all sources."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fastdiff.data.selection import Selection
from fastdiff.sanitize import CONTROL

LARGEST_IMAGE = 256 << 20
"""Size limit of an image file in bytes, checked before it is read."""
LARGEST_TEXT = 10 << 20
"""Size limit of an image's text or JSON file in bytes."""
LONGEST_CAPTION = 100_000
"""Size limit of a caption in UTF-8 bytes; text encoders read at most a few hundred."""


@dataclass(frozen=True, slots=True)
class ImageItem:
    """An image file with its captions or class."""

    key: str
    """Unique key in the source, of letters, digits, ``_`` and ``-``."""
    name: str
    """Name in messages: a path or ``tar!member``."""
    image: bytes
    """Content of the image file."""
    captions: tuple[str, ...] = ()
    label: int | None = None
    references: tuple[bytes, ...] = ()
    """Contents of the files of the pictures that it refers to."""
    mask: bytes | None = None
    """Content of its mask file; None: it has none."""


@dataclass(frozen=True, slots=True)
class BadItem:
    """A listed image that the source cannot provide."""

    key: str
    name: str
    reason: str


class ImageSource(ABC):
    """A source of images in a fixed order, divided into partitions for sequential reading.

    Unless a subclass says otherwise, ``samples_per_shard`` consecutive images are a partition.
    """

    name: str
    """Name for the provenance, without secrets."""
    classes: int | None = None
    """Number of classes; None: the images have none."""
    class_names: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers; empty: unknown."""
    captioned: bool
    """Whether the images have captions."""
    references: int = 0
    """Pictures that each image refers to."""
    digest: str
    """Sha256 of the listing; it changes with the partitions."""
    selection: Selection
    """What the listing left out."""
    _per_partition: int

    @property
    def partitions(self) -> int:
        """Number of partitions; the last one may be shorter."""
        return -(-len(self) // self._per_partition)

    def _numbers(self, partition: int) -> range:
        return range(len(self))[partition * self._per_partition : (partition + 1) * self._per_partition]

    def stamps(self, partition: int) -> dict[str, Any] | None:
        """Return, as JSON values by name, what changes when a file of a partition is edited; None: it cannot tell.

        The files themselves are not read. The names are those of the files; the name "" is for what is already listed.
        Called by several threads.
        """
        return None

    def found_in(self, partition: int) -> Selection:
        """Return what ``items`` of this partition, read to its end, left out beyond the listing."""
        return Selection()

    def items(self, partition: int) -> Iterator[ImageItem | BadItem]:
        """Yield the images of a partition, always the same.

        Raises:
            DataError: A file of many images is damaged; images before the damage were yielded.
            StorageError: The storage cannot be read.
        """
        return map(self.item, self._numbers(partition))

    @abstractmethod
    def most_captions(self, partition: int) -> int:
        """Return the largest number of captions per image in a partition, 0 without captions; read no images.

        Raises:
            DataError: As ``items``.
            StorageError: As ``items``.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images; ConfigError if that would require reading all of them."""

    @abstractmethod
    def item(self, index: int) -> ImageItem | BadItem:
        """Return an image by number, in the order of the partitions; ConfigError without random access."""


class BadCaptionError(Exception):
    """A caption is invalid; the message gives the reason."""


def clean_captions(value: object) -> tuple[str, ...]:
    """Return the captions in a metadata field: a string or a list of strings.

    Control characters become spaces, and captions are stripped. An empty caption is the empty prompt. BadCaptionError:
    there is none (null), the value has another type, or a caption is too long.
    """
    if value is None or value == [None]:
        raise BadCaptionError('its caption is null; give one, or an empty one ("") for the empty prompt')
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadCaptionError(f"its caption is {str(value)[:80]!r}, expected a string or a list of strings")
    return tuple(map(_clean, texts))


def _clean(text: str) -> str:
    length = len(text.encode("utf-8", "surrogatepass"))
    if length > LONGEST_CAPTION:
        raise BadCaptionError(f"its caption has {length} bytes, expected at most {LONGEST_CAPTION}")
    return CONTROL.sub(" ", text).strip()


def digest_of(kind: str, facts: Iterable[object]) -> str:
    """Return the sha256 of the kind of a source and its listing, one JSON line per fact."""
    digest = hashlib.sha256(kind.encode())
    for fact in facts:
        digest.update(b"\n" + json.dumps(fact, sort_keys=True).encode())
    return digest.hexdigest()


def stamp(path: str | os.PathLike[str]) -> list[int] | None:
    """Return size and mtime in nanoseconds of a file; None: it cannot be found."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return [status.st_size, status.st_mtime_ns]
