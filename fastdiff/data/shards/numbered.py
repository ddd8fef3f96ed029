"""Samples of shards by number, those of the first shard first: what readers of one and of several data sets share."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from fastdiff.data.shards.format import DatasetInfo


class NumberedSamples(ABC):
    """The samples that ``info`` describes; a context manager that closes its files."""

    info: DatasetInfo

    @property
    def shard_sizes(self) -> list[int]:
        """Samples per shard, in the order of ``info``."""
        return [shard.samples for shard in self.info.shards]

    def __len__(self) -> int:
        return self.info.samples

    def bucket_of(self, sample_ids: npt.ArrayLike) -> int:
        """Return the bucket of one or several samples; 0 for none.

        Raises:
            IndexError: A sample id is out of range.
            ValueError: The samples belong to several buckets.
        """
        shards = np.unique(np.searchsorted(self._shard_ends, self._known(sample_ids), side="right"))
        buckets = sorted({self.info.shards[shard].bucket for shard in shards})
        if len(buckets) > 1:
            raise ValueError(f"samples of several buckets ({buckets}) cannot be read as one batch")
        return buckets[0] if buckets else 0

    @abstractmethod
    def close(self) -> None:
        """Close all files; a later read opens them again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _shard_ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.shard_sizes, dtype=np.int64)

    def _known(self, sample_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the numbers of samples as an array; IndexError: one is out of range."""
        ids = np.atleast_1d(np.asarray(sample_ids, np.int64))
        for number in ids[(ids < 0) | (ids >= len(self))]:
            raise IndexError(f"sample {number} of {len(self)} samples")
        return ids
