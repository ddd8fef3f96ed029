"""The order of samples of several data sets, in exact shares of every epoch: a pure function of the seed and the sizes.

Each data set goes through its own endless order (``Order``), of which it knows only the number of its next sample.
An epoch holds a fixed number of samples of each, spread evenly: it is divided into short blocks, a block has its part
of each data set up to rounding, and the samples of a block are shuffled among the data sets. Any rank of any number of
ranks looks up any position, as in an order of one data set.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fastdiff.data.loading.order import BATCHES, Int64, Order, SampleOrder, cached, shuffle
from fastdiff.data.shards.format import MAX_VARIANTS

_BLOCK = 1024
"""Samples of a block, about; reads stay near-sequential in each data set within it."""
_KEPT = 8
"""Blocks in memory."""


@dataclass(frozen=True, slots=True)
class Part:
    """What an order takes of a data set."""

    number: int
    """Of the data set."""
    shards: Int64
    """``[S]`` numbers of its shards among all."""
    per_epoch: int
    """Its samples in an epoch, at least 1."""


class MixedOrder(SampleOrder):
    """The map from positions of the run to samples of one size of several data sets; thread-safe.

    With whole numbers of passes over a data set in ``per_epoch`` every sample is in every epoch as often; with others
    the passes go on from epoch to epoch, so the counts of two samples never differ by more than 1.

    Args:
        seed: Seed of the run, any integer; only its low 64 bits are used.
        shard_sizes: Samples per shard of all data sets.
        parts: What is taken of each data set, one at least.
        window_shards: Shards of one data set that are shuffled together.
        bucket: Bucket of the samples; each bucket draws different random words.

    Raises:
        ConfigError: ``window_shards`` is below 1.
        DataError: A shard is empty.
    """

    def __init__(
        self, seed: int, shard_sizes: Sequence[int], parts: Sequence[Part], window_shards: int, bucket: int = 0
    ) -> None:
        super().__init__(shard_sizes)
        self._seed, self._bucket, self._parts = seed, bucket, parts
        self._orders = [
            Order(seed, self._sizes[part.shards].tolist(), window_shards, bucket + MAX_VARIANTS * part.number)
            for part in parts
        ]
        counts = np.asarray([part.per_epoch for part in parts], np.int64)
        self._length = int(counts.sum())
        blocks = max(1, self._length // _BLOCK)
        # [blocks + 1, parts]: of a data set the samples before a block are its share of them, rounded half up.
        number = np.arange(blocks + 1, dtype=np.int64)[:, None]
        self._before = (2 * number * counts + blocks) // (2 * blocks)
        self._block_starts = self._before.sum(axis=1)
        self._blocks: OrderedDict[tuple[int, ...], tuple[Int64, Int64]] = OrderedDict()

    def __len__(self) -> int:
        return self._length

    def _samples(self, n: Int64) -> Int64:
        ids = np.empty_like(n)
        epochs, offsets = np.divmod(n, len(self))
        blocks = np.searchsorted(self._block_starts, offsets, side="right") - 1
        for epoch, block in np.unique(np.stack([epochs, blocks]), axis=1).T.tolist():
            chosen = (epochs == epoch) & (blocks == block)
            which, number = cached(self._blocks, (epoch, block), partial(self._block, epoch, block), _KEPT)
            within = offsets[chosen] - self._block_starts[block]
            ids[chosen] = self._taken(epoch, which[within], number[within])
        return ids

    def _block(self, epoch: int, block: int) -> tuple[Int64, Int64]:
        """Return for each sample of a block the part that it is of, and its number in the epoch within that part."""
        first, end = self._before[block], self._before[block + 1]
        which = np.repeat(np.arange(len(self._parts)), end - first)
        # The purpose of the first bucket after this one, which no subset of one needs.
        which = which[shuffle(self._seed, len(which), 4 * (self._bucket + 1), epoch, block)]
        number = np.empty_like(which)
        for part in range(len(self._parts)):
            number[which == part] = np.arange(first[part], end[part])
        return which, number

    def _taken(self, epoch: int, which: Int64, number: Int64) -> Int64:
        ids = np.empty_like(which)
        for part in np.unique(which).tolist():
            chosen, order, own = which == part, self._orders[part], self._parts[part]
            shard, row = order.locate(order.samples(epoch * own.per_epoch + number[chosen]))
            ids[chosen] = self._starts[own.shards[shard]] + row
        return ids


class MixedBucketOrder(SampleOrder):
    """The map from positions of the run to samples of several sizes of several data sets; thread-safe.

    The samples [s * G, (s + 1) * G) of step s belong to one bucket. What is left of a bucket after its last full global
    batch of an epoch begins the bucket's next one, so no sample is left out: after any number of epochs the samples of
    a bucket are fewer than G short, and after G epochs all shares are exact.

    Args:
        seed: Seed of the run, any integer; only its low 64 bits are used.
        shard_sizes: Samples per shard of all data sets.
        parts: What is taken of each data set, by bucket.
        window_shards: Shards of one data set and bucket that are shuffled together.
        global_batch: G, samples per optimizer step.

    Raises:
        ConfigError: ``window_shards`` is below 1.
        DataError: A shard is empty.
    """

    def __init__(
        self,
        seed: int,
        shard_sizes: Sequence[int],
        parts: Mapping[int, Sequence[Part]],
        window_shards: int,
        global_batch: int,
    ) -> None:
        super().__init__(shard_sizes)
        self._seed, self._global_batch = seed, global_batch
        self.buckets = tuple(sorted(parts))
        self._orders = [MixedOrder(seed, shard_sizes, parts[b], window_shards, b) for b in self.buckets]
        self._lengths = np.asarray([len(order) for order in self._orders], np.int64)
        self._epochs: OrderedDict[tuple[int, ...], tuple[Int64, Int64]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of samples of an epoch, on average."""
        return int(self._lengths.sum())

    def _samples(self, n: Int64) -> Int64:
        ids = np.empty_like(n)
        batches, offsets = np.divmod(n, self._global_batch)
        for batch in np.unique(batches).tolist():
            epoch = self._epoch_of(batch)
            which, number = cached(self._epochs, (epoch,), partial(self._epoch, epoch))
            place, chosen = batch - int(self._batches_before(epoch).sum()), batches == batch
            order = self._orders[int(which[place])]
            ids[chosen] = order.samples(int(number[place]) * self._global_batch + offsets[chosen])
        return ids

    def _batches_before(self, epoch: int) -> Int64:
        """Return the full batches of each bucket before an epoch: ``[buckets]``."""
        return epoch * self._lengths // self._global_batch

    def _epoch_of(self, batch: int) -> int:
        epoch = batch * self._global_batch // len(self)
        while int(self._batches_before(epoch + 1).sum()) <= batch:
            epoch += 1
        return epoch

    def _epoch(self, epoch: int) -> tuple[Int64, Int64]:
        """Return the bucket of every batch of an epoch, as its place in ``buckets``, and its number in the bucket."""
        first, end = self._batches_before(epoch), self._batches_before(epoch + 1)
        which = np.repeat(np.arange(len(self.buckets)), end - first)
        which = which[shuffle(self._seed, len(which), BATCHES, epoch, 0)]
        number = np.empty_like(which)
        for bucket in range(len(self.buckets)):
            number[which == bucket] = np.arange(first[bucket], end[bucket])
        return which, number
