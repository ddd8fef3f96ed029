"""Reader of samples by number, with verification of every byte and optional substitution of damaged samples.

``open_shard.py`` copies the rows of a batch from the files.
"""

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
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdiff.conditions import CAPTIONED
from fastdiff.data.shards.format import ENCODED, DatasetInfo, ShardInfo
from fastdiff.data.shards.null_embedding import read_null
from fastdiff.data.shards.numbered import NumberedSamples
from fastdiff.data.shards.open_shard import OpenShard, Stored, require_size
from fastdiff.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]

_CLOSE_SECONDS = 1.0


class LatentReader(NumberedSamples):
    """A folder of latent shards opened for reading; thread-safe.

    Args:
        folder: Output folder of `fastdiff encode`.
        open_shards: Number of shards per bucket kept open (file and index); use two windows of the order.
        fetch: Downloads a shard and its two indices if missing; called whenever a shard is opened. By default all
            shards must be present now.
        substitute: Replace a damaged sample by the first intact one of ``substitutes`` and record it in
            ``substituted``, by its position in the run. A sample without a position is never replaced.

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
        self.class_numbers: Sequence[int] | None = None
        """Numbers to read in place of those of the classes of the data set, one per class; None: its own."""
        self._unusable: dict[int, str] = {}  # shards, and why
        self._fetch = fetch
        self._used_buckets = len({shard.bucket for shard in self.info.shards})
        self._starts = list(itertools.accumulate(self.shard_sizes, initial=0))
        self._stored = [Stored.all_of(self.info, bucket) for bucket in range(max(1, len(self.info.buckets)))]
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        # Held during a whole read, so that no other thread closes a descriptor in use.
        self._lock = threading.Lock()
        if fetch is None and not substitute:
            for shard in self.info.shards:
                require_size(self.folder / shard.name, shard)

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
            out: Arrays to read into, as returned by ``empty``; by default new ones.
            choice: Variant of each sample, by default the first. ``latent`` ``[B]`` int64: 1 is the flipped latent;
                ``caption`` ``[B]`` in [0, 1): u selects caption floor(u * n) of the sample's n captions.
            positions: ``[B]`` int64, positions of the samples in the run; required by ``substitute``.

        Returns:
            ``latent`` ``[B, C, H, W]`` and every other column ``[B, ...]`` in the stored dtype; ``label`` ``[B]`` int64
            if the data set has classes.

        Raises:
            DataError: A sample is damaged or truncated; the message gives shard, key and offset.
            IndexError: A sample id is out of range.
            ValueError: The samples belong to several buckets, or a variant does not exist.
        """
        ids = np.asarray(sample_ids, np.int64)
        bucket = self.bucket_of(ids)
        arrays = dict(out) if out is not None else self.empty(len(ids), bucket)
        self._check_arrays(arrays, len(ids), bucket)
        flips, captions = self._check_choice(choice or {}, len(ids))
        contents = [(stored, arrays[stored.name].reshape(-1).view(np.uint8).data) for stored in self._stored[bucket]]
        with self._lock:
            # Sorted by number, hence by shard and offset: near-sequential reads, and each shard is opened once per
            # batch.
            for row in np.argsort(ids, kind="stable").tolist():
                fill = partial(self._fill, arrays, contents, row, flips[row], captions[row])
                if positions is not None and self.substitute:
                    self._fill_or_substitute(fill, int(ids[row]), int(positions[row]))
                else:
                    fill(int(ids[row]))
        return arrays

    def empty(self, batch: int, bucket: int = 0) -> Arrays:
        """Return uninitialised arrays for ``batch`` samples of a bucket."""
        arrays: Arrays = {s.name: np.empty((batch, *s.column.shape), s.column.numpy) for s in self._stored[bucket]}
        if self.info.classes is not None:
            arrays["label"] = np.empty(batch, np.int64)
        return arrays

    def null(self) -> Arrays:
        """Return the embedding of the empty prompt, by column (``fastdiff.conditions``).

        Raises:
            DataError: A file is missing or damaged.
            StorageError: A file cannot be read.
        """
        columns = self.info.batch_columns(0)
        return {
            name: read_null(self.folder, self.info, name)[: columns[name].shape[0]].copy() for name in self.info.null
        }

    def keys(self, sample_ids: npt.ArrayLike) -> list[str]:
        """Return ``shard:key`` of samples, for messages."""
        ids = self._known(sample_ids)
        with self._lock:
            return [self._key(number) for number in ids.tolist()]

    def captions(self, sample_ids: npt.ArrayLike) -> list[str]:
        """Return the first caption of each sample, without those that have none; DataError if a sample is damaged."""
        ids = self._known(sample_ids)
        with self._lock:
            notes = [shard.read_json(row) for shard, row in map(self._locate, ids.tolist())]
        found = [note.get("captions") for note in notes if isinstance(note, dict)]
        texts = [captions[0] for captions in found if isinstance(captions, list) and captions]
        return [text for text in texts if isinstance(text, str) and text.strip()]

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        if not self._lock.acquire(timeout=_CLOSE_SECONDS):
            return  # a read in another thread hangs in the storage; the process end closes the files
        try:
            while self._open:
                os.close(self._open.popitem()[1].descriptor)
        finally:
            self._lock.release()

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
            caption = int(caption_share * own)  # fp64: < own for every share < 1
        variant = {**dict.fromkeys(ENCODED, flip), **dict.fromkeys(CAPTIONED, caption)}
        for stored, values in contents:
            own_row = values[row * stored.nbytes : (row + 1) * stored.nbytes]
            shard.read_array(stored.components[variant.get(stored.name, 0)], sample, stored, own_row)
        if self.info.classes is not None:
            own_class = shard.read_number("cls", sample, 0, self.info.classes - 1)
            arrays["label"][row] = own_class if self.class_numbers is None else self.class_numbers[own_class]

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
        if shard in self._unusable:  # checked once, not for each of its samples
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
            raise ValueError(f"choice['latent'] must be {batch} integers from 0 to {variants - 1}")
        if captions.shape != (batch,) or not ((captions >= 0) & (captions < 1)).all():
            raise ValueError(f"choice['caption'] must be {batch} numbers in [0, 1)")
        return flips.tolist(), captions.tolist()


_TRIED = 64
"""Candidates per shard; if all are damaged, the search continues in the next shard."""


@dataclass(frozen=True, order=True, slots=True)
class Substitution:
    """The replacement of a damaged sample."""

    damaged: str
    """The damaged sample, ``shard:key``, or ``shard:sample N`` if the keys of the shard are lost."""
    by: str
    """The sample read instead, ``shard:key``."""
    reason: str
    """The problem of the damaged sample."""


def substitutes(shards: Sequence[ShardInfo], starts: Sequence[int], number: int) -> Iterator[int]:
    """Yield candidates to replace sample ``number``, in order of preference, from the same bucket.

    The following samples of its shard come first, wrapping around, then the next shards from the same row on. A lost
    shard is therefore not replaced by a single sample. The order depends only on the data set, so every rank of any
    number of ranks chooses the same sample.

    Args:
        shards: Shards of the data set.
        starts: Number of the first sample of each shard.
        number: Number of the damaged sample.
    """
    own = bisect.bisect_right(starts, number) - 1
    row = number - starts[own]
    for place in range(own, own + len(shards)):
        shard = place % len(shards)
        size = shards[shard].samples
        if shards[shard].bucket == shards[own].bucket:
            candidates = (starts[shard] + (row + step) % size for step in range(min(size, _TRIED)))
            yield from (candidate for candidate in candidates if candidate != number)
