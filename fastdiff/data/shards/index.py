"""Our index of a shard: offset, length and crc32 of every component in the tar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import canonical_json

MAX_INDEX_BYTES = 128 << 20
"""Size limit of an index; a shard of a million samples has about this many bytes."""

_SHARD_FORMAT = "fastdiff-shard-index"
# Both become parts of file names and messages.
_KEY, _COMPONENT = re.compile(r"[A-Za-z0-9_-]{1,80}"), re.compile(r"[A-Za-z0-9_.]{1,80}")


@dataclass(frozen=True, slots=True)
class Place:
    """A component of a sample in a shard; in shards of older versions several share the same bytes by hard links."""

    key: str
    component: str
    offset: int
    length: int
    crc32: int

    def __str__(self) -> str:
        return f"key {self.key} ({self.component}), offset {self.offset}"


@dataclass(frozen=True, slots=True)
class Component:
    """A component of all samples of a shard, as three int64 arrays ``[samples]``."""

    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    crc32: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The keys of a shard in the order of the tar, and its components (``latent.npy``, ``cls``, ``json``) by name."""

    keys: list[str]
    components: dict[str, Component]

    @classmethod
    def collect(cls, places: Iterable[Place]) -> ShardIndex:
        """Build the index of components in the order of the tar; ValueError: samples differ in their components."""
        columns: dict[str, list[Place]] = {}
        for place in places:
            columns.setdefault(place.component, []).append(place)
        keys = [place.key for place in next(iter(columns.values()), [])]
        if any([place.key for place in column] != keys for column in columns.values()):
            raise ValueError("the samples of a shard differ in their components")
        arrays = {name: [(p.offset, p.length, p.crc32) for p in column] for name, column in columns.items()}
        components = {name: Component(*np.array(rows, np.int64).T.copy()) for name, rows in arrays.items()}
        return cls(keys, components)

    def place(self, component: str, row: int) -> Place:
        """Return the place of a component of one sample."""
        column = self.components[component]
        return Place(
            self.keys[row], component, int(column.offset[row]), int(column.length[row]), int(column.crc32[row])
        )

    def places(self) -> Iterator[Place]:
        """Yield all components, sample by sample."""
        for row in range(len(self.keys)):
            yield from self.places_of(row)

    def places_of(self, row: int) -> Iterator[Place]:
        """Yield the components of one sample by offset: the order of the tar, except for links of older versions."""
        places = (self.place(name, row) for name in self.components)
        yield from sorted(places, key=lambda place: (place.offset, place.component))

    def to_bytes(self) -> bytes:
        """Return the content of the ``.index.json`` file."""
        components = {
            name: {"offset": c.offset.tolist(), "length": c.length.tolist(), "crc32": c.crc32.tolist()}
            for name, c in self.components.items()
        }
        content = {"format": _SHARD_FORMAT, "version": 1, "keys": self.keys, "components": components}
        return canonical_json(content) + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> ShardIndex:
        """Parse the output of ``to_bytes``; ValueError if the content is invalid."""
        try:
            parsed = json.loads(content)
            if (parsed["format"], parsed["version"]) != (_SHARD_FORMAT, 1):
                raise ValueError("a different format or version")
            keys = [str(key) for key in parsed["keys"]]
            components = {
                str(name): Component(*(np.array(columns[part], np.int64) for part in ("offset", "length", "crc32")))
                for name, columns in parsed["components"].items()
            }
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not an index of fastdiff: {str(error)[:200]!r}") from error
        if not all(map(_KEY.fullmatch, keys)) or not all(map(_COMPONENT.fullmatch, components)):
            raise ValueError("a key or component is not 1 to 80 letters, digits, _ and -")
        if len(set(keys)) != len(keys):
            raise ValueError("a duplicate key")
        arrays = (a for c in components.values() for a in (c.offset, c.length, c.crc32))
        if not components or any(array.shape != (len(keys),) or (array < 0).any() for array in arrays):
            raise ValueError("an array differs in length from the keys, or holds a negative number")
        return cls(keys, components)

    def wds2idx(self) -> str:
        """Return the output of DALI's ``wds2idx`` v1.2 for this shard; a hard link gets the place of its target."""
        lines: dict[str, list[str]] = {}
        for place in self.places():
            name = f"{place.key}.{place.component}"
            lines.setdefault(place.key, []).append(f"{place.component} {place.offset} {place.length} {name}")
        return "".join(f"{line}\n" for line in [f"v1.2 {len(lines)}", *map(" ".join, lines.values())])
