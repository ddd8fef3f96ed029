"""Read samples by number, checking every byte: a sample comes back exactly as it was encoded, or not at all.

Rows go from the file straight into the batch with ``preadv``; their crc32 is computed by ISA-L, to the same number as
by zlib in a fraction of the time. Files are never memory-mapped: a shard that shrinks under a mapping kills the process
with SIGBUS, while a short read is an error with a name.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from fastdiff.data.index import Component, ShardIndex
from fastdiff.data.integrity import Problem, check_size, load_index, unreadable
from fastdiff.data.null import read_null
from fastdiff.data.shards import CAPTIONED, LATENT, Column, DatasetInfo, ShardInfo
from fastdiff.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]

_CLOSE_SECONDS = 1.0
_MAX_DIGITS = 19


class LatentReader:
    """A folder of latent shards, opened for reading; usable from several threads.

    Args:
        folder: Where `fastdiff encode` wrote.
        open_shards: How many shards of every bucket, file and index, are kept open; two windows of the order, where
            one is used.
        fetch: Brings a shard and its two indices into the folder, unless they are there; called whenever a shard is
            opened. By default all shards must be there now.

    Raises:
        DataError: dataset.json or a shard is missing, truncated or damaged.
        StorageError: A file cannot be read.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, open_shards: int = 64, fetch: Callable[[ShardInfo], None] | None = None
    ) -> None:
        self.folder = Path(folder)
        self.info = DatasetInfo.read(folder)
        self.open_shards = open_shards
        self._fetch = fetch
        self._used_buckets = len({shard.bucket for shard in self.info.shards})
        self._starts = list(itertools.accumulate(self.shard_sizes, initial=0))
        self._stored = [_Stored.all_of(self.info, bucket) for bucket in range(max(1, len(self.info.buckets)))]
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        # One lock for all of a read: a descriptor that another thread closes must not be read from.
        self._lock = threading.Lock()
        if fetch is None:
            for shard in self.info.shards:
                _require_size(self.folder / shard.name, shard)

    @property
    def shard_sizes(self) -> list[int]:
        """Samples per shard, in the order of dataset.json."""
        return [shard.samples for shard in self.info.shards]

    def __len__(self) -> int:
        """Samples of the data set."""
        return self.info.samples

    def read(
        self,
        sample_ids: npt.ArrayLike,
        out: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        choice: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> Arrays:
        """Read samples of one bucket.

        Args:
            sample_ids: ``[B]`` int64 in [0, len(self)), in any order.
            out: Arrays to read into, as ``empty`` makes them; by default new ones.
            choice: Which variant of each sample. ``latent`` ``[B]`` int64: 1 is the flipped one; ``caption`` ``[B]`` in
                [0, 1): u is number floor(u * n) of the sample's n captions. By default the first ones.

        Returns:
            ``latent`` ``[B, C, H, W]`` in the stored dtype, and every other column likewise; ``label``
            ``[B]`` int64 if the data set has classes.

        Raises:
            DataError: A sample is damaged or cut off; names shard, key and offset.
            IndexError: There is no such sample.
            ValueError: The samples are of several buckets, or there is no such variant.
        """
        ids = np.asarray(sample_ids, np.int64)
        bucket = self.bucket_of(ids)
        arrays = dict(out) if out is not None else self.empty(len(ids), bucket)
        self._check_arrays(arrays, len(ids), bucket)
        flips, captions = self._check_choice(choice or {}, len(ids))
        contents = [(stored, _bytes_of(arrays[stored.name])) for stored in self._stored[bucket]]
        with self._lock:
            # By number is by shard and offset: near-sequential reads, and each shard is opened once per
            # batch.
            for row in np.argsort(ids, kind="stable").tolist():
                shard, sample = self._locate(int(ids[row]))
                caption = 0
                if self.info.captions > 1:
                    own = shard.read_number("captions", sample, 1, self.info.captions)
                    caption = int(captions[row] * own)  # fp64: below ``own`` for every u below 1
                variant = {LATENT: flips[row], **dict.fromkeys(CAPTIONED, caption)}
                for stored, values in contents:
                    own_row = values[row * stored.nbytes : (row + 1) * stored.nbytes]
                    shard.read_array(stored.components[variant.get(stored.name, 0)], sample, stored, own_row)
                if self.info.classes is not None:
                    arrays["label"][row] = shard.read_number("cls", sample, 0, self.info.classes - 1)
        return arrays

    def empty(self, batch: int, bucket: int = 0) -> Arrays:
        """Uninitialised arrays for ``batch`` samples of a bucket."""
        arrays: Arrays = {s.name: np.empty((batch, *s.column.shape), s.column.dtype) for s in self._stored[bucket]}
        if self.info.classes is not None:
            arrays["label"] = np.empty(batch, np.int64)
        return arrays

    def bucket_of(self, sample_ids: npt.ArrayLike) -> int:
        """The bucket of one sample or of several, 0 of none.

        Raises:
            IndexError: There is no such sample.
            ValueError: The samples are of several buckets.
        """
        ids = self._known(sample_ids)
        shards = np.unique(np.searchsorted(self._starts, ids, side="right") - 1)
        buckets = {self.info.shards[shard].bucket for shard in shards}
        if len(buckets) > 1:
            raise ValueError(f"samples of the buckets {sorted(buckets)} cannot be read as one batch")
        return buckets.pop() if buckets else 0

    def null(self) -> Arrays:
        """The embedding of the empty prompt: ``context`` ``[L, D]`` and ``pooled`` ``[P]``, as far as there are any.

        Raises:
            DataError: A file is missing or damaged.
            StorageError: A file cannot be read.
        """
        return {name: read_null(self.folder, self.info, name) for name in self.info.null}

    def keys(self, sample_ids: npt.ArrayLike) -> list[str]:
        """``shard:key`` of samples, for messages."""
        ids = self._known(sample_ids)
        with self._lock:
            places = [self._locate(number) for number in ids.tolist()]
            return [f"{shard.info.name}:{shard.index.keys[row]}" for shard, row in places]

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):
            return  # the read of another thread hangs in its storage; the files close with the process
        try:
            while self._open:
                os.close(self._open.popitem()[1].descriptor)
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _known(self, sample_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        ids = np.atleast_1d(np.asarray(sample_ids, np.int64))
        for number in ids[(ids < 0) | (ids >= len(self))]:
            raise IndexError(f"sample {number} of {len(self)} samples")
        return ids

    def _locate(self, number: int) -> tuple[_OpenShard, int]:
        shard = bisect.bisect_right(self._starts, number) - 1
        if shard not in self._open:
            if len(self._open) >= max(1, self.open_shards) * self._used_buckets:
                os.close(self._open.popitem(last=False)[1].descriptor)
            if self._fetch is not None:
                self._fetch(self.info.shards[shard])
            self._open[shard] = _OpenShard.open(self.folder, self.info.shards[shard])
        self._open.move_to_end(shard)
        return self._open[shard], number - self._starts[shard]

    def _check_arrays(self, arrays: Mapping[str, npt.NDArray[Any]], batch: int, bucket: int) -> None:
        for name, expected in self.empty(0, bucket).items():
            array = arrays.get(name)
            shape = (batch, *expected.shape[1:])
            if array is None or array.shape != shape or array.dtype != expected.dtype or not array.flags.c_contiguous:
                raise ValueError(f"out[{name!r}] must be a contiguous {expected.dtype} array of shape {shape}")

    def _check_choice(self, choice: Mapping[str, npt.NDArray[Any]], batch: int) -> tuple[list[int], list[float]]:
        flips = choice.get("latent", np.zeros(batch, np.int64))
        captions = choice.get("caption", np.zeros(batch))
        variants = 1 + self.info.flipped
        if flips.shape != (batch,) or flips.dtype.kind not in "iu" or not ((flips >= 0) & (flips < variants)).all():
            raise ValueError(f"choice['latent'] must be {batch} whole numbers below {variants}")
        if captions.shape != (batch,) or not ((captions >= 0) & (captions < 1)).all():
            raise ValueError(f"choice['caption'] must be {batch} numbers from 0 to below 1")
        return flips.tolist(), captions.tolist()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A column of a bucket as its samples have it in the shards."""

    name: str
    column: Column
    header: bytes
    nbytes: int
    components: tuple[str, ...]
    """One per variant."""

    @classmethod
    def all_of(cls, info: DatasetInfo, bucket: int) -> list[_Stored]:
        return [
            cls(name, column, column.header, column.nbytes, tuple(f"{v}.npy" for v in info.variants(name)))
            for name, column in info.columns_of(bucket).items()
        ]


@dataclass(frozen=True, slots=True)
class _OpenShard:
    path: Path
    info: ShardInfo
    index: ShardIndex
    descriptor: int

    @classmethod
    def open(cls, folder: Path, info: ShardInfo) -> _OpenShard:
        path = folder / info.name
        _require_size(path, info)
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

    def read_array(self, component: str, sample: int, stored: _Stored, values: memoryview) -> None:
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


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, to be written to."""
    return array.reshape(-1).view(np.uint8).data


def _without(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What of the buffers comes after their first ``count`` bytes."""
    rest = []
    for buffer in buffers:
        taken = min(count, len(buffer))
        count -= taken
        if taken < len(buffer):
            rest.append(buffer[taken:])
    return rest


def _require_size(path: Path, info: ShardInfo) -> None:
    problem = check_size(path, info)
    if problem is not None:
        raise problem.error(path.parent)
