"""A shard open for reading: copies the bytes of a sample into a batch and verifies them.

``preadv`` reads rows directly into the batch. ISA-L computes their crc32, equal to zlib's in a fraction of the time.
Files are never memory-mapped: a shard that shrinks under a mapping kills the process with SIGBUS, while a short read
raises an error.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from fastdiff.conditions import MASKS
from fastdiff.data.shards.format import Column, DatasetInfo, ShardInfo
from fastdiff.data.shards.index import Component, ShardIndex
from fastdiff.data.shards.integrity import Problem, check_size, load_index, unreadable
from fastdiff.errors import DataError

_MAX_DIGITS = 19
_NOTES, _LONGEST_NOTES = "json", 1 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored form of a column in the samples of a bucket."""

    name: str
    column: Column
    """As in a batch."""
    header: bytes
    nbytes: int
    components: tuple[str, ...]
    """Component names, one per variant."""
    masked: bool
    """Whether rows at the end may be missing, which are zeros."""
    mask_bytes: int
    """Of a mask the bytes of the values in the file, of which one or more is not zero; 0: it is no mask."""

    @classmethod
    def all_of(cls, info: DatasetInfo, bucket: int) -> list[Stored]:
        """Return all columns of a bucket."""
        batch = info.batch_columns(bucket)
        return [
            cls(
                name,
                batch[name],
                column.header,
                batch[name].nbytes,
                tuple(f"{v}.npy" for v in info.variants(name)),
                info.is_masked(name),
                column.nbytes if name in MASKS else 0,
            )
            for name, column in info.columns_of(bucket).items()
        ]


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard with a verified index, open for reading.

    Raises:
        DataError: From every method: a component is damaged; the message gives shard, key and offset.
        StorageError: From every method: the shard cannot be read.
    """

    path: Path
    info: ShardInfo
    index: ShardIndex
    descriptor: int

    @classmethod
    def open(cls, folder: Path, info: ShardInfo, *, whole: bool) -> OpenShard:
        """Open a shard; with ``whole``, require its full length."""
        path = folder / info.name
        if whole:
            require_size(path, info)
        elif not path.exists():
            raise Problem(info.name, "the file is missing").error(folder)
        index = load_index(path, info)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from error
        # The whole shard will be read in small pieces in random order. With this advice the kernel reads it
        # sequentially, far faster from a cold disk or a network. Without the advice, reads still work.
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        return cls(path, info, index, descriptor)

    def read_array(self, component: str, sample: int, stored: Stored, values: memoryview) -> None:
        """Read one row of a batch; the crc32 of the index covers the npy header and the values."""
        place, header = self._component(component), bytearray(len(stored.header))
        length, expected, row = place.length.item(sample), stored.header, values
        if stored.mask_bytes:
            values = memoryview(bytearray(stored.mask_bytes))
        if stored.masked:
            column = stored.column.of_size(length)
            values[column.nbytes :] = bytes(stored.nbytes - column.nbytes)
            values, expected = values[: column.nbytes], column.header
        if length != len(header) + len(values):
            raise self._damage(
                component, sample, f"{length} bytes, expected {len(header) + len(values)} for {stored.column}"
            )
        self._read(component, sample, place, [memoryview(header), values])
        self._check_crc(component, sample, place, crc32(values, crc32(header)))
        if header != expected:
            raise self._damage(component, sample, f"the npy header {bytes(header)!r} does not match {stored.column}")
        if stored.mask_bytes:
            row[:] = values[: len(row)]
            if not any(row) or any(values[len(row) :]):
                marks = "a token beyond the longest caption" if any(row) else "no token of the caption"
                raise self._damage(component, sample, f"it marks {marks}, expected 1 to {len(row)}")

    def read_number(self, component: str, sample: int, least: int, largest: int) -> int:
        """Read a component that holds a decimal number."""
        place = self._component(component)
        length = place.length.item(sample)
        if length > _MAX_DIGITS:
            raise self._damage(component, sample, f"{length} bytes, expected a number up to {largest}")
        text = bytearray(length)
        self._read(component, sample, place, [memoryview(text)])
        self._check_crc(component, sample, place, crc32(text))
        if not text.isdigit() or not least <= int(text) <= largest:
            of = f"none of the {largest + 1} classes" if component == "cls" else f"not in {least} to {largest}"
            raise self._damage(component, sample, f"{bytes(text)!r} is {of}")
        return int(text)

    def read_json(self, sample: int) -> Any:
        """Read what the encode has noted of a sample (``<key>.json``); None if the shard has no notes."""
        place = self.index.components.get(_NOTES)
        if place is None:
            return None
        length = place.length.item(sample)
        if length > _LONGEST_NOTES:
            raise self._damage(_NOTES, sample, f"{length} bytes, expected at most {_LONGEST_NOTES}")
        text = bytearray(length)
        self._read(_NOTES, sample, place, [memoryview(text)])
        self._check_crc(_NOTES, sample, place, crc32(text))
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._damage(_NOTES, sample, f"not JSON ({error})") from error

    def _component(self, name: str) -> Component:
        component = self.index.components.get(name)
        if component is None:
            raise Problem(self.info.name, f"there are no {name} components").error(self.path.parent)
        return component

    def _read(self, component: str, sample: int, place: Component, buffers: list[memoryview]) -> None:
        """Fill the buffers, together as long as the component; a single read may return less."""
        offset, length, done = place.offset.item(sample), place.length.item(sample), 0
        while done < length:
            try:
                count = os.preadv(self.descriptor, buffers, offset + done)
            except OSError as error:
                raise unreadable(self.path, error, f", {self.index.place(component, sample)}") from error
            if count == 0:
                what = f"the file ends after {done} of {length} bytes; it was truncated"
                raise self._damage(component, sample, what)
            done += count
            if done < length:
                buffers = _without(buffers, count)

    def _check_crc(self, component: str, sample: int, place: Component, found: int) -> None:
        expected = place.crc32.item(sample)
        if found != expected:
            raise self._damage(component, sample, f"crc32 {found:08x}, expected {expected:08x}")

    def _damage(self, component: str, sample: int, what: str) -> DataError:
        return Problem(self.info.name, what, self.index.place(component, sample)).error(self.path.parent)


def require_size(path: Path, info: ShardInfo) -> None:
    """Raise DataError if the size of a shard differs from dataset.json, StorageError if it cannot be read."""
    problem = check_size(path, info)
    if problem is not None:
        raise problem.error(path.parent)


def _without(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first ``count`` bytes."""
    rest = []
    for buffer in buffers:
        taken = min(count, len(buffer))
        count -= taken
        if taken < len(buffer):
            rest.append(buffer[taken:])
    return rest
