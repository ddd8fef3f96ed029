"""Gradients of several ranks, added up in chunks of the flat buffer behind the last backward pass of a step.

For passes that a CUDA graph holds: DistributedDataParallel reads from the device in each, and starts its sums in
the middle. Nothing overlaps the passes here; what works on a chunk overlaps the sums of those behind it. On two ranks
the sums are those of DistributedDataParallel to the bit; on more, the order of the ranks in them may differ.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK_BYTES = 128 * 2**20
"""Of a chunk: few enough to be few launches, small enough for the work behind the last."""


class FlatSum:
    """The sum of the flat gradients of all ranks, in place.

    Args:
        gradient: of this rank, ``[N]``.
    """

    def __init__(self, gradient: Tensor) -> None:
        self._chunks = torch.split(gradient, _CHUNK_BYTES // gradient.element_size())

    def arrived(self) -> Iterator[int]:
        """Start all sums, and yield how many elements have arrived, in order; called by all ranks.

        On a GPU it is the stream that waits for a chunk, and not the host.
        """
        sums = [torch.distributed.all_reduce(chunk, async_op=True) for chunk in self._chunks]
        end = 0
        for chunk, work in zip(self._chunks, sums, strict=True):
            work.wait()
            end += chunk.numel()
            yield end
