"""Read samples by number, checking every byte: a sample comes back exactly as it was encoded, or not at all.

How a row gets from a file into a batch stands in ``open_shard.py``.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import CAPTIONED, LATENT, DatasetInfo, ShardInfo
from fastdiff.data.shards.null_embedding import read_null
from fastdiff.data.shards.open_shard import OpenShard, Stored, require_size
from fastdiff.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]

_CLOSE_SECONDS = 1.0


class LatentReader:
    """A folder of latent shards, opened for reading; usable from several threads.

    Args:
        folder: Where `fastdiff encode` wrote.
        open_shards: How many shards of every bucket, file and index, are kept open; two windows of the order, where
            one is used.
        fetch: Brings a shard and its two indices into the folder, unless they are there; called whenever a shard is
            opened. By default all shards must be there now.
        substitute: Read another sample in the place of a damaged one (``damaged.substitutes`` says which) and note it
            in ``substituted``, by its position in the run. A sample whose position is not given is never replaced.

    Raises:
        DataError: dataset.json or, without ``substitute``, a shard is missing, truncated or damaged.
        StorageError: A file cannot be read.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        open_shards: int = 64,
        fetch: Callable[[ShardInfo], None] | None = None,
        substitute: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.info = DatasetInfo.read(folder)
        self.open_shards = open_shards
        self.substitute = substitute
        self.substituted: dict[int, Substitution] = {}
        self._unusable: dict[int, str] = {}  # shards, and why
        self._fetch = fetch
        self._used_buckets = len({shard.bucket for shard in self.info.shards})
        self._starts = list(itertools.accumulate(self.shard_sizes, initial=0))
        self._stored = [Stored.all_of(self.info, bucket) for bucket in range(max(1, len(self.info.buckets)))]
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        # One lock for all of a read: a descriptor that another thread closes must not be read from.
        self._lock = threading.Lock()
        if fetch is None and not substitute:
            for shard in self.info.shards:
                require_size(self.folder / shard.name, shard)

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
        positions: npt.NDArray[np.int64] | None = None,
    ) -> Arrays:
        """Read samples of one bucket.

        Args:
            sample_ids: ``[B]`` int64 in [0, len(self)), in any order.
            out: Arrays to read into, as ``empty`` makes them; by default new ones.
            choice: Which variant of each sample. ``latent`` ``[B]`` int64: 1 is the flipped one; ``caption`` ``[B]`` in
                [0, 1): u is number floor(u * n) of the sample's n captions. By default the first ones.
            positions: ``[B]`` int64, where the samples stand in the run: for ``substitute``.

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
                fill = partial(self._fill, arrays, contents, row, flips[row], captions[row])
                if positions is not None and self.substitute:
                    self._fill_or_substitute(fill, int(ids[row]), int(positions[row]))
                else:
                    fill(int(ids[row]))
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
            return [self._key(number) for number in ids.tolist()]

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

    def _fill(
        self,
        arrays: Arrays,
        contents: list[tuple[Stored, memoryview]],
        row: int,
        flip: int,
        caption_share: float,
        number: int,
    ) -> None:
        """Read sample ``number`` into a row of a batch."""
        shard, sample = self._locate(number)
        caption = 0
        if self.info.captions > 1:
            own = shard.read_number("captions", sample, 1, self.info.captions)
            caption = int(caption_share * own)  # fp64: below ``own`` for every share below 1
        variant = {LATENT: flip, **dict.fromkeys(CAPTIONED, caption)}
        for stored, values in contents:
            own_row = values[row * stored.nbytes : (row + 1) * stored.nbytes]
            shard.read_array(stored.components[variant.get(stored.name, 0)], sample, stored, own_row)
        if self.info.classes is not None:
            arrays["label"][row] = shard.read_number("cls", sample, 0, self.info.classes - 1)

    def _fill_or_substitute(self, fill: Callable[[int], None], number: int, position: int) -> None:
        try:
            return fill(number)
        except DataError as error:
            damage = error
        for other in substitutes(self.info.shards, self._starts, number):
            with contextlib.suppress(DataError):
                fill(other)
                self.substituted[position] = Substitution(self._key(number), self._key(other), str(damage))
                return
        raise damage

    def _key(self, number: int) -> str:
        try:
            shard, row = self._locate(number)
        except DataError:
            if not self.substitute:
                raise
            found = bisect.bisect_right(self._starts, number) - 1
            return f"{self.info.shards[found].name}:sample {number - self._starts[found]}"
        return f"{shard.info.name}:{shard.index.keys[row]}"

    def _locate(self, number: int) -> tuple[OpenShard, int]:
        shard = bisect.bisect_right(self._starts, number) - 1
        if shard not in self._open:
            if len(self._open) >= max(1, self.open_shards) * self._used_buckets:
                os.close(self._open.popitem(last=False)[1].descriptor)
            self._open[shard] = self._opened(shard)
        self._open.move_to_end(shard)
        return self._open[shard], number - self._starts[shard]

    def _opened(self, shard: int) -> OpenShard:
        if shard in self._unusable:  # not looked at again for each of its samples
            raise DataError(self._unusable[shard])
        info = self.info.shards[shard]
        try:
            if self._fetch is not None:
                self._fetch(info)
            return OpenShard.open(self.folder, info, whole=not self.substitute)
        except DataError as error:
            if self.substitute:
                self._unusable[shard] = str(error)
            raise

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


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, to be written to."""
    return array.reshape(-1).view(np.uint8).data


_TRIED = 64
"""Samples of one shard: where more in a row are damaged, the search goes on in the next shard."""


@dataclass(frozen=True, order=True, slots=True)
class Substitution:
    """A sample that was read in the place of another one."""

    damaged: str
    """``shard:key``, or ``shard:sample N`` where the keys of the shard are lost."""
    by: str
    """``shard:key``."""
    reason: str
    """What is wrong with the damaged one."""


def substitutes(shards: Sequence[ShardInfo], starts: Sequence[int], number: int) -> Iterator[int]:
    """Samples that may take the place of sample ``number``, in this order; all of its bucket.

    First those behind it in its shard, which goes round, then those of the next shards from the same row on: so the
    samples of a shard that is lost are not all replaced by the same one. It depends on nothing but the data set: any
    rank of any number of ranks chooses the same.

    Args:
        shards: Those of the data set.
        starts: Number of the first sample of each.
        number: The damaged one.
    """
    own = bisect.bisect_right(starts, number) - 1
    row = number - starts[own]
    for place in range(own, own + len(shards)):
        shard = place % len(shards)
        size = shards[shard].samples
        if shards[shard].bucket == shards[own].bucket:
            candidates = (starts[shard] + (row + step) % size for step in range(min(size, _TRIED)))
            yield from (candidate for candidate in candidates if candidate != number)
