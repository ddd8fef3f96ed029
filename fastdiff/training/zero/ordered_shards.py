"""Gradients under ZeRO-1 to 3 in the order of the micro-batches of a step, in place of DeepSpeed's reductions.

DeepSpeed adds up the micro-batches of a rank before the ranks (stage 1), or the ranks before the micro-batches (stages
2 and 3), in the order of its collectives, and divides before or after. Here, as in the flat engine
(``training.engines.ordered_sum``), a rank gets its slices of every micro-batch's gradient from every rank and adds them
up one after the other. That happens bucket by bucket in the backward pass, so that no rank has the gradient of the
whole network. A rank has sums of its own slices alone, as DeepSpeed has from stage 2.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from fastdiff.parallel.fragments import Flat, Shapes
from fastdiff.parallel.slices import add_in_order, exchange
from fastdiff.parallel.world import World
from fastdiff.training.optimizer.exact_norm import exact_norm


class OrderedShards:
    """This rank's slices of the sum of the gradients of all micro-batches of all ranks.

    Args:
        wrapper: DeepSpeed's optimizer at stage 2, which stage 1 becomes, or 3, not offloaded. Its hooks hand over the
            gradients from now on.
        parameters: the trained ones by name.
        shapes: of the trained ones, in the order of the network.
        flats: fp32 tensors of this rank.
        dtype: of the sums.
        bucket: elements that are exchanged at once, at most; a larger parameter is exchanged alone.
        world: the ranks.
    """

    def __init__(
        self, wrapper: Any, parameters: dict[str, nn.Parameter], shapes: Shapes, flats: Sequence[Flat],
        dtype: torch.dtype, bucket: int, world: World,
    ) -> None:  # fmt: skip
        self._wrapper, self._parameters, self._world = wrapper, parameters, world
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._sizes = {name: prod(shape) for name, shape in shapes.items()}
        self._flats = [flat.key for flat in flats]
        self._sums = [torch.zeros(flat.key.numel(), dtype=dtype, device=world.device) for flat in flats]
        self._own = {f.name: f.of(sums) for flat, sums in zip(flats, self._sums, strict=True) for f in flat.fragments}
        self._slices = world.gather({f.name: (f.start, f.numel) for flat in flats for f in flat.fragments})
        self._buckets = _filled(self._sizes, bucket)
        self._left = list(self._buckets)
        """Buckets that are not exchanged in this micro-batch yet."""
        self._ready: set[str] = set()
        """Parameters with a complete gradient."""
        self._begins = True
        """Whether the next micro-batch is the first of its step."""
        self._replace_reductions()

    def _replace_reductions(self) -> None:
        wrapper = self._wrapper
        wrapper.independent_gradient_partition_epilogue = lambda: None
        if isinstance(wrapper, DeepSpeedZeroOptimizer):
            wrapper.process_gradients = lambda parameter, group: self.take(parameter)
            return
        wrapper.reduce_ready_partitions_and_remove_grads = self.take
        wrapper._prepare_fp32_grad_for_sub_group = self._set_gradient
        # Memory of DeepSpeed's own sums and buckets.
        wrapper._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.clear()
        wrapper.grad_partitions_flat_buffer, wrapper.contiguous_gradients = None, False
        for unused in wrapper.ipg_buckets.values():
            unused.buffer = None

    def take(self, parameter: nn.Parameter) -> None:
        """Note that the gradient of a parameter is complete; exchange the buckets that are, in their order."""
        self._ready.add(self._names[id(parameter)])
        while self._left and self._ready.issuperset(self._left[0]):
            self.reduce(self._left.pop(0))

    def end_micro_batch(self) -> None:
        """Exchange what is left, after the backward pass; a parameter without a gradient counts as zeros."""
        for names in self._left:
            self.reduce(names)
        self._left, self._begins = list(self._buckets), False
        self._ready.clear()

    @torch.no_grad()
    def reduce(self, names: Sequence[str]) -> None:
        """Add the gradients of a bucket of every rank, in the order of the ranks."""
        given = {name: self._gradient(name) for name in names}
        slices = [[given[name].narrow(0, *own[name]) for name in names if name in own] for own in self._slices]
        sizes = [sum(map(Tensor.numel, each)) for each in slices]
        found = exchange(torch.cat([part for each in slices for part in each]), sizes, self._world)
        add_in_order([self._own[name] for name in names if name in self._own], found, begins=self._begins)
        for name in names:
            self._parameters[name].grad = None

    def _gradient(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        gradient = parameter.grad
        return parameter.new_zeros(self._sizes[name]) if gradient is None else gradient.reshape(-1)

    def norm(self) -> Tensor:
        """Return the norm of the whole sum, times the scale of the loss; infinite if an element is not finite."""
        return exact_norm(self._sums, self._world.device, self._world)

    def hand_over(self) -> None:
        """Give the sums to DeepSpeed's step, which clears the list; the next micro-batch overwrites them."""
        for group, sums in enumerate(self._sums):
            self._wrapper.averaged_gradients[group] = [sums]
        self._begins = True

    def _set_gradient(self, group: int) -> None:
        self._flats[group].grad = self._sums[group].float()


def _filled(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Return the names in buckets, in the order in which a backward pass has their gradients."""
    buckets: list[list[str]] = [[]]
    elements = 0
    for name in reversed(sizes):
        if buckets[-1] and elements + sizes[name] > limit:
            buckets.append([])
            elements = 0
        buckets[-1].append(name)
        elements += sizes[name]
    return buckets
