"""The order of the samples: a pure function of the seed and the sizes of the shards.

Position n = 0, 1, 2, ... counts samples over the whole run. The order has no state except a cache, so any rank of any
number of ranks can look up any position. Random numbers are the raw 64-bit words of Philox, which is specified to the
bit; ``numpy.random.Generator.permutation`` may change between versions.
"""

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fastdiff.errors import ConfigError, DataError

Int64 = npt.NDArray[np.int64]
Value = TypeVar("Value")


class SampleOrder(ABC):
    """A map from positions of the run to samples; thread-safe."""

    buckets: tuple[int, ...] = ()
    """The buckets in use, ascending, if there are several."""

    def __init__(self, shard_sizes: Sequence[int]) -> None:
        self._sizes = np.asarray(shard_sizes, np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._sizes)])
        self._lock = threading.Lock()  # for the caches

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples of an epoch."""

    def samples(self, positions: npt.ArrayLike) -> Int64:
        """Return the sample ids at positions of the run.

        Args:
            positions: ``[B]`` int64, not negative.

        Returns:
            ``[B]`` int64, counted over the shards in the order of dataset.json.
        """
        n = np.asarray(positions, np.int64)
        if n.size and n.min() < 0:
            raise ValueError("positions must not be negative")
        with self._lock:
            return self._samples(n)

    @abstractmethod
    def _samples(self, n: Int64) -> Int64: ...

    def locate(self, ids: npt.ArrayLike) -> tuple[Int64, Int64]:
        """Return the shard, and the row in it, of sample ids; ``[B]`` int64 each."""
        ids = np.asarray(ids, np.int64)
        shard = np.searchsorted(self._starts, ids, side="right") - 1
        return shard, ids - self._starts[shard]


# Second word of the counter: the purpose of the random words, plus 4 times the bucket.
_SUBSET, _SHARDS, _SAMPLES, BATCHES = 0, 1, 2, 3
# "fastdiff" as a number: the order shares the seed of the noise streams, but not their random words.
_KEY = 0x6661737464696666


class Order(SampleOrder):
    """The map from positions of the run to samples of one size; thread-safe.

    Every epoch is a permutation of all samples: the shards are shuffled, then the samples within windows of
    ``window_shards`` consecutive shuffled shards, so that reads stay within few files. A few windows are kept in
    memory. The loader's thread looks up future positions, the callbacks look up past ones.

    Args:
        seed: Seed of the run, any integer; only its low 64 bits are used.
        shard_sizes: Samples per shard.
        window_shards: Shards that are shuffled together.
        bucket: Bucket of the samples; each bucket draws different random words.

    Raises:
        ConfigError: ``window_shards`` is below 1.
        DataError: There are no samples, or a shard is empty.
    """

    def __init__(self, seed: int, shard_sizes: Sequence[int], window_shards: int, bucket: int = 0) -> None:
        if window_shards < 1:
            raise ConfigError(f"--data.shuffle_shards {window_shards}: expected at least 1")
        self.window_shards = window_shards
        super().__init__(shard_sizes)
        if self._sizes.size == 0 or self._sizes.min() < 1:
            raise DataError("a data set needs at least one shard, and every shard at least one sample")
        self._seed, self._bucket = seed, bucket
        self._epochs: OrderedDict[tuple[int, ...], tuple[Int64, Int64]] = OrderedDict()
        self._windows: OrderedDict[tuple[int, ...], Int64] = OrderedDict()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _samples(self, n: Int64) -> Int64:
        ids = np.empty_like(n)
        epochs, offsets = np.divmod(n, len(self))
        for epoch in np.unique(epochs).tolist():
            shards, window_starts = self._epoch(epoch)
            windows = np.searchsorted(window_starts, offsets, side="right") - 1
            for window in np.unique(windows[epochs == epoch]).tolist():
                chosen = (epochs == epoch) & (windows == window)
                ids[chosen] = self._window(epoch, window, shards)[offsets[chosen] - window_starts[window]]
        return ids

    def _epoch(self, epoch: int) -> tuple[Int64, Int64]:
        """Return the shuffled shards of an epoch, and the offset of each window in the epoch."""

        def build() -> tuple[Int64, Int64]:
            shards = self._shuffle(len(self._sizes), _SHARDS, epoch, 0)
            before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._sizes[shards])[:-1]])
            return shards, before[:: self.window_shards]

        return cached(self._epochs, (epoch,), build)

    def _window(self, epoch: int, window: int, shards: Int64) -> Int64:
        """Return the shuffled sample ids of a window."""

        def build() -> Int64:
            chosen = shards[window * self.window_shards : (window + 1) * self.window_shards]
            ids = np.concatenate([np.arange(self._starts[s], self._starts[s + 1]) for s in chosen])
            return ids[self._shuffle(len(ids), _SAMPLES, epoch, window)]

        return cached(self._windows, (epoch, window), build)

    def _shuffle(self, size: int, purpose: int, epoch: int, window: int) -> Int64:
        return shuffle(self._seed, size, purpose + 4 * self._bucket, epoch, window)


def shuffle(seed: int, size: int, purpose: int, epoch: int, window: int) -> Int64:
    """Return a permutation ``[size]`` int64."""
    key = np.array([seed & (2**64 - 1), _KEY], np.uint64)
    # The lowest word counts the draws; the other three are unique per shuffle.
    counter = np.array([0, purpose, epoch, window], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64)


def subset(seed: int, size: int, count: int | None) -> Int64:
    """Return ``count`` of ``size`` samples, drawn by the seed, in ascending order; all if there are fewer."""
    return np.sort(shuffle(seed, size, _SUBSET, 0, 0)[:count])


def cached(
    cache: OrderedDict[tuple[int, ...], Value], key: tuple[int, ...], build: Callable[[], Value], size: int = 3
) -> Value:
    """Return the cached value, built if missing; the least recently used value is evicted."""
    if key not in cache:
        cache[key] = build()
        if len(cache) > size:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


def positions(step: int, micro_index: int, rank: int, ranks: int, micro: int, global_batch: int) -> Int64:
    """Return the positions ``[micro]`` int64 of a micro-batch: ``s * G + (m * ranks + rank) * micro + i``."""
    start = step * global_batch + (micro_index * ranks + rank) * micro
    return np.arange(start, start + micro, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPositions:
    """The endless sequence of a rank's micro-batches from ``start_samples`` on, as positions of the run.

    Raises:
        ConfigError: The batch is not divisible by the ranks, or the start is not a multiple of the batch.
    """

    start_samples: int
    rank: int
    ranks: int
    micro: int
    global_batch: int

    def __post_init__(self) -> None:
        together = self.micro * self.ranks
        if min(self.micro, self.ranks, self.global_batch) < 1 or self.global_batch % together:
            raise ConfigError(
                f"a batch of {self.global_batch} samples is not divisible by {self.micro} (--batch.micro) x "
                f"{self.ranks} ranks; choose a multiple of {together}"
            )
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"rank {self.rank} of {self.ranks} ranks: expected 0 to {self.ranks - 1}")
        if self.start_samples < 0 or self.start_samples % self.global_batch:
            raise ConfigError(
                f"cannot start at sample {self.start_samples}: a run starts between optimizer steps; choose a multiple "
                f"of --batch.samples {self.global_batch}"
            )

    def __getitem__(self, index: int) -> Int64:
        """Return the positions ``[micro]`` int64 of this rank's micro-batch ``index``, counted from the start."""
        step, micro_index = divmod(index, self.global_batch // (self.micro * self.ranks))
        step += self.start_samples // self.global_batch
        return positions(step, micro_index, self.rank, self.ranks, self.micro, self.global_batch)
