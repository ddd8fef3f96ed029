"""Which sample takes the place of a damaged one, if the run is to go on without it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastdiff.data.shards import ShardInfo

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
