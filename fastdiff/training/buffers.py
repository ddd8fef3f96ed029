"""Flat buffers of a network: fp32 weights, their bf16 copy and the gradient, parameter after parameter.

Every parameter begins at a multiple of 64 elements, so that its address suits matrix products and 128-bit accesses; the
elements between are zeros. The weights of convolutions of channels_last maps lie in that order, too: a GPU would copy
others into it in every micro-batch. The parameters of one rank's averages are contiguous, so that a rank has at most
three ``Flat`` per learning rate: those before its own, its own, and those behind.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from fastdiff.models.build import Model
from fastdiff.parallel.fragments import Flat, Fragment, channels_last
from fastdiff.parallel.world import World

_ALIGNED = 64
"""Elements: 128 bytes in bf16."""


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter in the flat buffers."""

    name: str
    parameter: nn.Parameter
    offset: int
    channels_last: bool
    """Whether the elements of its ``[O, I, H, W]`` lie in the order ``[O, H, W, I]``."""
    lr_multiplier: float
    """Factor of its learning rate."""

    @property
    def end(self) -> int:
        """Behind its last element and the zeros that follow."""
        return self.offset + _padded(self.parameter.numel())

    def of(self, buffer: Tensor) -> Tensor:
        """Return the parameter's part of a flat buffer, in its shape."""
        return self.shaped(buffer[self.offset : self.offset + self.parameter.numel()])

    def shaped(self, values: Tensor) -> Tensor:
        """Return values ``[numel]`` in the order of the flat buffers as a view in the parameter's shape."""
        shape = self.parameter.shape
        return channels_last(values, shape) if self.channels_last else values.view(shape)


def places_of(
    model: nn.Module, *, channels_last: bool = False, lr_multiplier: Callable[[str], float] = lambda name: 1.0
) -> tuple[Place, ...]:
    """Return the places of the trained parameters: by ``lr_multiplier``, and in the order of the network.

    Multipliers have the order of the first parameter of each, as the groups of DeepSpeed.
    """
    trained = [(name, p, lr_multiplier(name)) for name, p in model.named_parameters() if p.requires_grad]
    order = list(dict.fromkeys(multiplier for _, _, multiplier in trained))
    trained.sort(key=lambda one: order.index(one[2]))
    sizes = [_padded(p.numel()) for _, p, _ in trained]
    return tuple(
        Place(name, parameter, end - size, channels_last and _is_kernel(parameter), multiplier)
        for (name, parameter, multiplier), size, end in zip(trained, sizes, accumulate(sizes), strict=True)
    )


def _is_kernel(parameter: Tensor) -> bool:
    """Whether it is the weight of a convolution over more than one pixel, whose layouts differ."""
    return parameter.dim() == 4 and parameter.shape[2:].numel() > 1


def _padded(numel: int) -> int:
    return -(-numel // _ALIGNED) * _ALIGNED


@torch.no_grad()
def move_into(places: Sequence[Place], model: Model, dtype: torch.dtype, device: torch.device) -> tuple[
    Tensor, Tensor | None
]:  # fmt: skip
    """Move a network to the device; its trained parameters become views of a flat buffer of ``dtype``.

    Frozen parameters are cast to ``dtype``; those of convolutions of channels_last maps get that order, too. Buffers
    stay as they are.

    Returns:
        The fp32 weights before rounding ``[N]``, and their copy in ``dtype`` ``[N]``; None if the parameters are views
        of the weights themselves.
    """
    total = places[-1].end
    master = torch.zeros(total, device=device)
    copy = None if dtype == torch.float32 else torch.zeros(total, dtype=dtype, device=device)
    for place in places:
        place.of(master).copy_(place.parameter)
        working = place.of(master if copy is None else copy)
        working.copy_(place.of(master))
        place.parameter.data = working
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            order = torch.channels_last if model.channels_last and _is_kernel(parameter) else torch.preserve_format
            parameter.data = parameter.to(device, dtype, memory_format=order)
    model.to(device)
    return master, copy


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A range of the flat buffers, and its ``Flat``."""

    flat: Flat
    first: int
    """Its place in the buffers."""
    grad: Tensor
    """``[N]`` in the dtype of sums."""
    copy: Tensor | None
    """``[N]`` in the dtype of the network; None in fp32."""
    lr_multiplier: float
    """Factor of the learning rate of all of it."""

    @property
    def end(self) -> int:
        """Behind its last element in the buffers."""
        return self.first + self.grad.numel()


def ranges_of(places: Sequence[Place], world: World) -> list[tuple[bool, Sequence[Place]]]:
    """Cut parameters into those before this rank's own, its own (True: it averages and saves these) and the rest.

    A range has one learning rate: where that changes, there is a further cut.
    """
    total = places[-1].end
    owners = [min(world.size - 1, math.floor((p.offset + p.end) / 2 * world.size / total)) for p in places]
    sides = [(owner > world.rank) - (owner < world.rank) for owner in owners]
    cut = groupby(zip(sides, places, strict=True), key=lambda one: (one[0], one[1].lr_multiplier))
    return [(side == 0, [place for _, place in found]) for (side, _), found in cut]


def fragments_of(places: Sequence[Place]) -> tuple[Fragment, ...]:
    """Return the whole parameters of a range, at their offsets in it."""
    first = places[0].offset
    return tuple(
        Fragment(
            p.name, 0, p.parameter.numel(), p.offset - first, tuple(p.parameter.shape) if p.channels_last else None
        )
        for p in places
    )  # fmt: skip


class Gradients:
    """The gradient of a step in one flat buffer, to which each micro-batch adds.

    The backward pass of a micro-batch leaves its gradients in ``.grad``, without a copy; they are added here, in
    ``dtype``, all at once. Were ``.grad`` views of the buffer, each parameter would cost one or two more launches.
    """

    def __init__(self, places: Sequence[Place], dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.zeros(places[-1].end, dtype=dtype, device=device)
        self._parameters = [place.parameter for place in places]
        self.views = [place.of(self.buffer) for place in places]
        """The part of each parameter, in its shape."""
        self.ends = [place.end for place in places]
        self.has_some = False
        """Whether the buffer has gradients of this step; otherwise the next ones overwrite it."""

    def add(self, which: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Add gradients of the parameters with these numbers; the first of a step overwrite what was there."""
        views = [self.views[number] for number in which]
        if self.has_some:
            torch._foreach_add_(views, list(gradients))
        else:
            torch._foreach_copy_(views, list(gradients))

    def collect(self) -> None:
        """Add all ``.grad``."""
        found = [(number, p.grad) for number, p in enumerate(self._parameters) if p.grad is not None]
        if len(found) < len(self._parameters) and not self.has_some:
            self.buffer.zero_()
        if found:
            self.add([number for number, _ in found], [gradient for _, gradient in found])

    def release(self) -> None:
        """Remove all ``.grad``."""
        for parameter in self._parameters:
            parameter.grad = None
