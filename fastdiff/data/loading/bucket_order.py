"""The order of samples of several sizes: all samples of an optimizer step have one size.

Samples of different sizes cannot be stacked, and ranks with different sizes would wait for the slowest rank. The unit
of the shuffle is therefore the global batch.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import numpy as np

from fastdiff.data.loading.order import BATCHES, Int64, Order, SampleOrder, cached, shuffle
from fastdiff.errors import ConfigError


class BucketOrder(SampleOrder):
    """The map from positions of the run to samples of several sizes; thread-safe.

    The samples [s * G, (s + 1) * G) of step s belong to one bucket. An epoch takes all full global batches of every
    bucket, in the bucket's own order (``Order``), and shuffles the batches of all buckets. The remainder of a bucket is
    left out; it changes with every epoch, as the order does. A bucket with fewer samples than a batch is never used.

    Args:
        seed: Seed of the run, any integer; only its low 64 bits are used.
        shard_sizes: Samples per shard.
        buckets: Bucket of each shard.
        window_shards: Shards of one bucket that are shuffled together.
        global_batch: G, samples per optimizer step.
        sizes: Latent height and width of each bucket, for messages.

    Attributes:
        buckets: The buckets in use, ascending.
        left_out: Number of samples of each unused bucket.

    Raises:
        ConfigError: No bucket fills a batch, or ``window_shards`` is below 1.
        DataError: A shard is empty.
    """

    def __init__(
        self,
        seed: int,
        shard_sizes: Sequence[int],
        buckets: Sequence[int],
        window_shards: int,
        global_batch: int,
        sizes: Sequence[tuple[int, int]],
    ) -> None:
        self._seed, self._global_batch = seed, global_batch
        super().__init__(shard_sizes)
        all_sizes, of_shard = self._sizes, np.asarray(buckets, np.int64)
        totals = {bucket: int(all_sizes[of_shard == bucket].sum()) for bucket in np.unique(of_shard).tolist()}
        used = [bucket for bucket, samples in totals.items() if samples >= global_batch]
        self.buckets = tuple(used)
        self.left_out = {bucket: samples for bucket, samples in totals.items() if samples < global_batch}
        if not used:
            fullest = max(totals, key=totals.__getitem__)
            height, width = sizes[fullest]
            raise ConfigError(
                f"no bucket fills a batch: the largest, {fullest} ({height}x{width} latents), has {totals[fullest]} "
                f"samples, fewer than --batch.samples {global_batch}, and a batch holds one bucket only; use a smaller "
                "batch, or encode with fewer buckets"
            )
        self._shards = [np.flatnonzero(of_shard == bucket) for bucket in used]
        self._orders = [
            Order(seed, all_sizes[shards].tolist(), window_shards, bucket)
            for bucket, shards in zip(used, self._shards, strict=True)
        ]
        self._batches = [len(order) // global_batch for order in self._orders]
        self._epochs: OrderedDict[tuple[int, ...], tuple[Int64, Int64]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of samples of an epoch, full batches only."""
        return sum(self._batches) * self._global_batch

    def _samples(self, n: Int64) -> Int64:
        ids = np.empty_like(n)
        epochs, within = np.divmod(n, len(self))
        batches, offsets = np.divmod(within, self._global_batch)
        for epoch in np.unique(epochs).tolist():
            which, number = cached(self._epochs, (epoch,), partial(self._epoch, epoch))
            of_epoch = epochs == epoch
            for bucket in np.unique(which[batches[of_epoch]]).tolist():
                chosen = of_epoch & (which[batches] == bucket)
                place = number[batches[chosen]] * self._global_batch + offsets[chosen]
                order, shards = self._orders[bucket], self._shards[bucket]
                shard, row = order.locate(order.samples(epoch * len(order) + place))
                ids[chosen] = self._starts[shards[shard]] + row
        return ids

    def _epoch(self, epoch: int) -> tuple[Int64, Int64]:
        """Return the bucket of every batch of an epoch, and its number within that bucket.

        Only the sequence of buckets is shuffled. Each bucket is read in order, so that reads stay within few files.
        """
        which = np.repeat(np.arange(len(self._batches)), self._batches)
        which = which[shuffle(self._seed, len(which), BATCHES, epoch, 0)]
        number = np.empty_like(which)
        for bucket, count in enumerate(self._batches):
            number[which == bucket] = np.arange(count)
        return which, number
