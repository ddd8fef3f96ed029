"""Gradients of several ranks, reduced by torch's DistributedDataParallel while the backward pass runs.

DDP reduces in the dtype of the parameters. Its hook for communication adds the gradients of a bucket to the flat
buffer, whose dtype may be wider, and reduces that range of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fastdiff.training.engines.buffers import Gradients, Place

_BUCKET_MIB = 64
"""Of a bucket in the dtype of the parameters: few enough to be few launches, small enough to overlap."""


class DataParallel:
    """A network whose gradients are added up over all ranks.

    Args:
        model: on its device.
        places: of its parameters in the flat buffers.
        gradients: receive the sums.
    """

    def __init__(self, model: nn.Module, places: Sequence[Place], gradients: Gradients) -> None:
        self._places, self._gradients = places, gradients
        self._numbers = {id(place.parameter): number for number, place in enumerate(places)}
        # Parameters without a gradient count as zeros. With this search the buckets also keep the order of the network.
        self._ddp = DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False, find_unused_parameters=True,
            bucket_cap_mb=_BUCKET_MIB,
        )  # fmt: skip
        self._ddp.register_comm_hook(None, lambda state, bucket: self.reduce(bucket))

    def __call__(self, *inputs: Tensor, reduces: bool, **condition: Tensor) -> Tensor:
        """Run the forward pass.

        Args:
            inputs: of the network.
            reduces: whether its backward pass is the last of a step.
            condition: of the network.
        """
        self._ddp.require_backward_grad_sync = reduces
        return self._ddp(*inputs, **condition)  # type: ignore[no-any-return]

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Reduce the sums of the parameters of a ``GradBucket``, whose own buffer stays as it is and is unused."""
        numbers = [self._numbers[id(parameter)] for parameter in bucket.parameters()]
        self._gradients.add(numbers, bucket.gradients())
        works = [
            torch.distributed.all_reduce(self._gradients.buffer[first:end], async_op=True)
            for first, end in self._ranges(numbers)
        ]
        unused = bucket.buffer()
        futures: list[Future[Any]] = [work.get_future() for work in works]
        arrived = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)
        return arrived.then(lambda _: unused)

    def _ranges(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the ranges of the flat buffers that these parameters fill; one if they are neighbours."""
        ordered = sorted(numbers)
        cuts = [0, *(k for k, (a, b) in enumerate(pairwise(ordered), start=1) if b != a + 1), len(ordered)]
        return [(self._places[ordered[a]].offset, self._places[ordered[b - 1]].end) for a, b in pairwise(cuts)]
