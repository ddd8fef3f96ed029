"""Gradients of several ranks, reduced by torch's DistributedDataParallel while the backward pass runs.

DDP reduces in the dtype of the parameters. Its hook for communication adds the gradients of a bucket to the flat
buffer, whose dtype may be wider, and reduces that range of it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fastdiff.batch import Output
from fastdiff.training.buffers import Gradients, Place

_BUCKET_MIB = 64
"""Of a bucket in the dtype of the parameters: few enough to be few launches, small enough to overlap."""


class DataParallel:
    """A network whose gradients are added up over all ranks.

    With several ranks a step has two more passes over the gradients: DDP copies them into its buckets, and the hook
    adds those to the flat buffer.
    """

    def __init__(self, model: nn.Module, places: Sequence[Place], gradients: Gradients) -> None:
        # With this search parameters without a gradient count as zeros, and torch does not rebuild the buckets in the
        # order in which gradients come: neighbours stay neighbours.
        self._ddp = DistributedDataParallel(
            _WithUnused(model, places[0].parameter), gradient_as_bucket_view=True, broadcast_buffers=False,
            find_unused_parameters=True, bucket_cap_mb=_BUCKET_MIB,
        )  # fmt: skip
        self.buckets = buckets = Buckets(places, gradients)
        # Not a method of this object: nothing would find that cycle, and DDP's hooks would stay on the parameters.
        self._ddp.register_comm_hook(None, lambda state, bucket: buckets.reduce(bucket))

    def __call__(self, *inputs: Tensor, reduces: bool, **condition: Tensor) -> Output:
        """Run the forward pass; ``reduces``: its backward pass is the last of a step."""
        self._ddp.require_backward_grad_sync = reduces
        return self._ddp(*inputs, **condition)  # type: ignore[no-any-return]


class Buckets:
    """The reductions of a step."""

    def __init__(self, places: Sequence[Place], gradients: Gradients) -> None:
        self._places, self._gradients = places, gradients
        self._numbers = {id(place.parameter): number for number, place in enumerate(places)}

    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Reduce a ``GradBucket``'s parameters, leaving its buffer unused.

        They are neighbours in the network, so in the flat buffer those of one learning rate are.
        """
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        numbered = {self._numbers[id(p)]: gradient for p, gradient in pairs if id(p) in self._numbers}
        # A bucket has its gradients in the layout of their parameters, and shows them as if they were contiguous.
        found = {number: self._places[number].shaped(gradient.view(-1)) for number, gradient in numbered.items()}
        self._gradients.add(list(found), list(found.values()))
        arrived: list[Future[Any]] = []
        for first, last in _runs(sorted(found)):
            sums = self._gradients.buffer[self._places[first].offset : self._places[last].end]
            arrived.append(torch.distributed.all_reduce(sums, async_op=True).get_future())
        unused: Tensor = bucket.buffer()

        def wait(_: Future[Any]) -> Tensor:
            for earlier in arrived[:-1]:
                earlier.wait()
            return unused

        return arrived[-1].then(wait)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last of each run of neighbours in sorted numbers."""
    first = numbers[0]
    for number, following in pairwise([*numbers, -1]):
        if following != number + 1:
            yield first, number
            first = following


class _WithUnused(nn.Module):
    """A network, and one parameter that it never uses: DDP warns of its search if all parameters are used.

    It is the last: torch fills buckets from the end, so that it never has one of its own.
    """

    def __init__(self, network: nn.Module, like: Tensor) -> None:
        super().__init__()
        self.network = network
        self.unused = nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))

    def forward(self, *inputs: Tensor, **condition: Tensor) -> Output:
        """Run the network."""
        return self.network(*inputs, **condition)  # type: ignore[no-any-return]
