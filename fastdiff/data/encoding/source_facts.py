"""What each unit was encoded from: a later call knows by it what was edited, and encodes only that anew.

Beside its shards a unit has ``train-000012.source.json``: what the source says of its files without reading them (of a
folder: size and mtime of each picture and caption file), and the digests of each picture and its captions. Where the
first differ, as after a copy, the digests decide. The shards themselves hold none of it, so they are the same for all
copies of a source.
"""

from __future__ import annotations

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
class UnitFacts:
    """What a unit was encoded from."""

    stamps: dict[str, Any] | None
    """See ``ImageSource.stamps``; taken before the files were read."""
    items: tuple[tuple[str, str, str], ...]
    """Name of each picture, sha256 of its file, and sha256 of its captions and class."""


@dataclass(frozen=True)
class Changes:
    """The difference between a source and what was encoded of it."""

    stale: frozenset[int] = frozenset()
    """Units whose pictures, captions or classes are others now."""
    same: frozenset[int] = frozenset()
    """Units that were compared, and whose pictures, captions and classes are the same."""
    fresh: Mapping[int, UnitFacts] = field(default_factory=dict)
    """Facts of units whose files differ only in what the file system says of them."""
    names: tuple[str, ...] = ()
    """What was edited, added or removed."""
    unseen: bool = False
    """Whether edits of some unit cannot be seen: the source cannot tell, or nothing was noted of it."""

    @property
    def shown(self) -> str:
        """The first names, for messages."""
        return ", ".join(self.names[:_NAMED]) + (", ..." if len(self.names) > _NAMED else "")


class WatchedSource:
    """The items of a source; the facts of each unit are noted while it is read."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source
        self._facts: dict[int, UnitFacts] = {}

    def items(self, unit: int) -> Iterator[ImageItem | BadItem]:
        """Yield the items of a unit."""
        stamps = self._source.stamps(unit)  # before the files are read: an edit during the read is seen later
        digests = []
        for item in self._source.items(unit):
            digests.append(_digest(item))
            yield item
        self._facts[unit] = UnitFacts(stamps, tuple(digests))

    def facts(self, unit: int) -> UnitFacts:
        """Return the facts of a unit that has been read to its end."""
        return self._facts.pop(unit)


def compare(source: ImageSource, known: Mapping[int, UnitFacts], whole: bool) -> Changes:
    """Compare a source with what was encoded of it.

    Only the file system is asked, except for units of which it says something else than before: those are read.

    Args:
        source: The source as it is now.
        known: The facts by unit.
        whole: Whether these were all units.

    Raises:
        DataError: As ``ImageSource.items``.
        StorageError: The source cannot be read.
    """
    units = [unit for unit in range(source.units) if whole or unit in known]
    with ThreadPoolExecutor(_THREADS) as threads, Bar("comparing the source", len(units), "shards") as bar:
        now = dict(zip(units, bar.over(threads.map(source.stamps, units)), strict=True))
    stale: set[int] = set()
    same: set[int] = set()
    fresh: dict[int, UnitFacts] = {}
    names: list[str] = []
    for unit, facts in known.items():
        stamps = now.get(unit)
        if stamps is None or facts.stamps is None:
            continue
        if stamps == facts.stamps:
            same.add(unit)
            continue
        if stamps.keys() != facts.stamps.keys():
            stale.add(unit)
            continue
        found = UnitFacts(stamps, tuple(map(_digest, source.items(unit))))
        if found.items == facts.items:
            same.add(unit)
            fresh[unit] = found
        else:
            stale.add(unit)
            names += _edited(facts, found)
    before = {name for facts in known.values() for name in facts.stamps or ()}
    after = {name for stamps in now.values() for name in stamps or ()}
    if whole:
        names += sorted(f"{name} (new)" for name in after - before)
        names += sorted(f"{name} (gone)" for name in before - after)
    unseen = len(same) + len(stale) < len(now.keys() | known.keys())
    return Changes(frozenset(stale), frozenset(same), fresh, tuple(names), unseen)


def _edited(before: UnitFacts, after: UnitFacts) -> Iterator[str]:
    known = {name: digests for name, *digests in before.items}
    for name, image, text in after.items:
        if name in known and known[name] != [image, text]:
            yield PurePath(name).name + ("" if known[name][0] != image else " (its caption or class)")


def _digest(item: ImageItem | BadItem) -> tuple[str, str, str]:
    if isinstance(item, BadItem):
        return item.name, "", _sha256(item.reason.encode())
    return item.name, _sha256(item.image), _sha256(json.dumps([item.captions, item.label]).encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
