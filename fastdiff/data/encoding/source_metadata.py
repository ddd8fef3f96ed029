"""What each partition was encoded from: a later call knows by it what was edited, and encodes only that anew.

Beside its shards a partition has ``train-000012.source.json``: what the source says of its files without reading them
(of a folder: size and mtime of each picture and caption file), and the digests of each picture and its captions. Where
the first differ, as after a copy, the digests decide. The shards themselves hold none of it, so they are the same for
all copies of a source.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from fastdiff.data.images.items import BadItem, ImageItem, ImageSource
from fastdiff.progress_bar import Bar

_DIGITS = 32
"""Hexadecimal digits of a digest."""
_THREADS = 16
"""Threads that ask the file system, which may be a network's."""
_NAMED = 3


@dataclass(frozen=True)
class PartitionMetadata:
    """What a partition was encoded from."""

    stamps: dict[str, Any] | None
    """See ``ImageSource.stamps``; taken before the files were read."""
    items: tuple[tuple[str, str, str], ...]
    """Name of each picture, sha256 of its file, its mask and its references, and sha256 of its captions and class."""


@dataclass(frozen=True)
class Changes:
    """The difference between a source and what was encoded of it."""

    stale: frozenset[int] = frozenset()
    """Partitions whose pictures, captions or classes are others now."""
    same: frozenset[int] = frozenset()
    """Partitions that were compared, and whose pictures, captions and classes are the same."""
    fresh: Mapping[int, PartitionMetadata] = field(default_factory=dict)
    """Metadata of partitions whose files differ only in what the file system says of them."""
    names: tuple[str, ...] = ()
    """What was edited, added or removed."""
    unseen: bool = False
    """Whether edits of some partition cannot be seen: the source cannot tell, or nothing was noted of it."""

    @property
    def shown(self) -> str:
        """The first names, for messages."""
        return ", ".join(self.names[:_NAMED]) + (", ..." if len(self.names) > _NAMED else "")


class WatchedSource:
    """The items of a source; the metadata of each partition are noted while it is read."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source
        self._metadata: dict[int, PartitionMetadata] = {}

    def items(self, partition: int) -> Iterator[ImageItem | BadItem]:
        """Yield the items of a partition."""
        stamps = self._source.stamps(partition)  # before the files are read: an edit during the read is seen later
        digests = []
        for item in self._source.items(partition):
            digests.append(_digest(item))
            yield item
        self._metadata[partition] = PartitionMetadata(stamps, tuple(digests))

    def metadata(self, partition: int) -> PartitionMetadata:
        """Return the metadata of a partition that has been read to its end."""
        return self._metadata.pop(partition)


def compare(source: ImageSource, known: Mapping[int, PartitionMetadata], whole: bool) -> Changes:
    """Compare a source with what was encoded of it.

    Only the file system is asked, except for partitions of which it says something else than before: those are read.

    Args:
        source: The source as it is now.
        known: The metadata by partition.
        whole: Whether these were all partitions.

    Raises:
        DataError: As ``ImageSource.items``.
        StorageError: The source cannot be read.
    """
    partitions = [partition for partition in range(source.partitions) if whole or partition in known]
    with ThreadPoolExecutor(_THREADS) as threads, Bar("comparing the source", len(partitions), "shards") as bar:
        now = dict(zip(partitions, bar.over(threads.map(source.stamps, partitions)), strict=True))
    stale: set[int] = set()
    same: set[int] = set()
    fresh: dict[int, PartitionMetadata] = {}
    names: list[str] = []
    for partition, metadata in known.items():
        stamps = now.get(partition)
        if stamps is None or metadata.stamps is None:
            continue
        if stamps == metadata.stamps:
            same.add(partition)
            continue
        if stamps.keys() != metadata.stamps.keys():
            stale.add(partition)
            continue
        found = PartitionMetadata(stamps, tuple(map(_digest, source.items(partition))))
        if found.items == metadata.items:
            same.add(partition)
            fresh[partition] = found
        else:
            stale.add(partition)
            names += _edited(metadata, found)
    before = {name for metadata in known.values() for name in metadata.stamps or ()}
    after = {name for stamps in now.values() for name in stamps or ()}
    if whole:
        names += sorted(f"{name} (new)" for name in after - before)
        names += sorted(f"{name} (gone)" for name in before - after)
    unseen = len(same) + len(stale) < len(now.keys() | known.keys())
    return Changes(frozenset(stale), frozenset(same), fresh, tuple(names), unseen)


def _edited(before: PartitionMetadata, after: PartitionMetadata) -> Iterator[str]:
    known = {name: digests for name, *digests in before.items}
    for name, image, text in after.items:
        if name in known and known[name] != [image, text]:
            yield PurePath(name).name + ("" if known[name][0] != image else " (its caption or class)")


def _digest(item: ImageItem | BadItem) -> tuple[str, str, str]:
    if isinstance(item, BadItem):
        return item.name, "", _sha256(item.reason.encode())
    return (
        item.name,
        _sha256(b"".join([item.image, item.mask or b"", *item.references])),
        _sha256(json.dumps([item.captions, item.label]).encode()),
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
