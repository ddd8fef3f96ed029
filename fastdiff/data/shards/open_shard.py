"""One shard, open for reading: bytes of a sample from the file into a batch, checked.

Rows go from the file straight into the batch with ``preadv``; their crc32 is computed by ISA-L, to the same number as
by zlib in a fraction of the time. Files are never memory-mapped: a shard that shrinks under a mapping kills the process
with SIGBUS, while a short read is an error with a name.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from fastdiff.data.shards.format import Column, DatasetInfo, ShardInfo
from fastdiff.data.shards.index import Component, ShardIndex
from fastdiff.data.shards.integrity import Problem, check_size, load_index, unreadable
from fastdiff.errors import DataError

_MAX_DIGITS = 19


@dataclass(frozen=True, slots=True)
class Stored:
    """A column of a bucket as its samples have it in the shards."""

    name: str
    column: Column
    header: bytes
    nbytes: int
    components: tuple[str, ...]
    """One per variant."""

    @classmethod
    def all_of(cls, info: DatasetInfo, bucket: int) -> list[Stored]:
        """All columns of a bucket."""
        return [
            cls(name, column, column.header, column.nbytes, tuple(f"{v}.npy" for v in info.variants(name)))
            for name, column in info.columns_of(bucket).items()
        ]


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard whose index is the right one, open for reading.

    Raises:
        DataError: From every method: what is read is damaged; names shard, key and offset.
        StorageError: It cannot be read.
    """

    path: Path
    info: ShardInfo
    index: ShardIndex
    descriptor: int

    @classmethod
    def open(cls, folder: Path, info: ShardInfo, *, whole: bool) -> OpenShard:
        """Open a shard, which need not have its full length unless it shall be ``whole``."""
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
        # All of it will be read, in small pieces and in random order: the kernel streams it in, which a cold disk or
        # a network serves far better. Only advice: where it is refused, or unknown to the system, reads still work.
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        return cls(path, info, index, descriptor)

    def read_array(self, component: str, sample: int, stored: Stored, values: memoryview) -> None:
        """Read the bytes of one row of a batch; the crc32 of the index covers the npy header and the values."""
        place, header = self._component(component), bytearray(len(stored.header))
        length, expected = place.length.item(sample), len(header) + len(values)
        if length != expected:
            raise self._damage(component, sample, f"{length} bytes, expected {expected} for {stored.column}")
        self._read(component, sample, place, [memoryview(header), values])
        self._check_crc(component, sample, place, crc32(values, crc32(header)))
        if header != stored.header:
            raise self._damage(component, sample, f"the npy header {bytes(header)!r} is not that of {stored.column}")

    def read_number(self, component: str, sample: int, least: int, largest: int) -> int:
        """Read a component that is a decimal text."""
        place = self._component(component)
        length = place.length.item(sample)
        if length > _MAX_DIGITS:
            raise self._damage(component, sample, f"{length} bytes, expected a number up to {largest}")
        text = bytearray(length)
        self._read(component, sample, place, [memoryview(text)])
        self._check_crc(component, sample, place, crc32(text))
        if not text.isdigit() or not least <= int(text) <= largest:
            of = f"none of the {largest + 1} classes" if component == "cls" else f"not from {least} to {largest}"
            raise self._damage(component, sample, f"{bytes(text)!r} is {of}")
        return int(text)

    def _component(self, name: str) -> Component:
        component = self.index.components.get(name)
        if component is None:
            raise Problem(self.info.name, f"there are no {name} components").error(self.path.parent)
        return component

    def _read(self, component: str, sample: int, place: Component, buffers: list[memoryview]) -> None:
        """Fill the buffers, as long as the component together; a read may bring less than was asked for."""
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
    """Raise DataError if a shard has not the size that dataset.json says, StorageError if it cannot be read."""
    problem = check_size(path, info)
    if problem is not None:
        raise problem.error(path.parent)


def _without(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What of the buffers comes after their first ``count`` bytes."""
    rest = []
    for buffer in buffers:
        taken = min(count, len(buffer))
        count -= taken
        if taken < len(buffer):
            rest.append(buffer[taken:])
    return rest
