"""Gradients added up in the order of the micro-batches of a step, which is the same for every number of ranks.

The ranks take consecutive micro-batches at a time, so that the gradients of one round follow those of the round before.
Each rank adds up one slice of all gradients: it gets that slice from every other rank after each micro-batch, and at
the end of the step all ranks get all slices. Nothing overlaps the passes. ``planning.scaling.zero`` counts the bytes;
``training.zero.ordered_shards`` does so under ZeRO-1 to 3.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from fastdiff.parallel.slices import add_in_order, exchange
from fastdiff.parallel.world import World
from fastdiff.training.buffers import Gradients, Place


class OrderedSum:
    """The sum of the gradients of all micro-batches of all ranks.

    Args:
        places: of the parameters.
        sums: where the sum is; between the micro-batches each rank has its own slice of it there.
        dtype: of the network, in which the gradients of a micro-batch are sent.
        world: the ranks.
    """

    def __init__(self, places: Sequence[Place], sums: Gradients, dtype: torch.dtype, world: World) -> None:
        self._sums, self._world = sums, world
        self._micro = Gradients(places, dtype, world.device)
        total, ranks = sums.buffer.numel(), world.size
        bounds = [total * rank // ranks for rank in range(ranks + 1)]
        self._sizes = [end - first for first, end in pairwise(bounds)]
        self._slices = torch.split(sums.buffer, self._sizes)
        self.sent_bytes = 0
        """Bytes that this rank has sent to others, each time that a slice goes to another rank."""

    def collect(self) -> None:
        """Take the gradient of a micro-batch from all ``.grad``, by the device alone."""
        self._micro.collect()

    def add(self) -> None:
        """Add the gradients of one micro-batch of every rank, in the order of the ranks; called by all of them."""
        given, rank = self._micro.buffer, self._world.rank
        add_in_order([self._slices[rank]], exchange(given, self._sizes, self._world), begins=not self._sums.has_some)
        self.sent_bytes += (given.numel() - self._sizes[rank]) * given.element_size()

    def arrived(self) -> Iterator[int]:
        """Give all ranks the whole sum; yield how many elements it has."""
        if self._world.size > 1:
            sent = [dist.broadcast(one, rank, async_op=True) for rank, one in enumerate(self._slices)]
            for work in sent:
                work.wait()
            own = self._slices[self._world.rank]
            self.sent_bytes += own.numel() * own.element_size() * (self._world.size - 1)
        yield self._sums.buffer.numel()
