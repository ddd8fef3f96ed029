"""Norm of the gradient whose bits depend neither on the order of its elements nor on how ranks and buffers cut it.

Every square is rounded down to a multiple of 2^-56 times a power of two above all squares, and summed as an integer in
two halves of 28 bits: integers have the same sum in any order. (Demmel and Nguyen, "Fast reproducible floating-point
summation", 2013, do so with floating-point numbers.) Of N elements the rounding takes at most 4 N 2^-56 of the sum,
2^-24 for a billion.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.parallel.world import World

_BITS = 28
"""Of each half: 2^34 elements do not overflow a sum of 63 bits."""
_AT_ONCE = {"cpu": 2**16, "cuda": 2**22}
"""Elements that are cast to fp64 at once: what fits into a cache, and what keeps the launches few."""


def exact_norm(gradients: Sequence[Tensor], device: torch.device, world: World | None = None) -> Tensor:
    """Return the norm of gradients, an fp32 scalar; infinite if an element is infinite or NaN.

    Args:
        gradients: fp32 or 16 bits, contiguous, of any shapes; zeros between them count for nothing.
        device: of the gradients.
        world: the ranks, each of which has other elements; None: this rank has all.
    """
    size = _AT_ONCE[device.type]
    parts = [part for gradient in gradients for part in torch.split(gradient.view(-1), size) if part.numel()]
    largest = torch.zeros((), device=device)
    for part in parts:
        largest = torch.maximum(largest, part.abs().max().float())
    # A comparison in a message would lose a NaN.
    largest = torch.where(largest.isfinite(), largest, torch.inf)
    if world is not None:
        world.max_(largest)
    limit = _power_of_two(largest)
    halves = torch.zeros(2, dtype=torch.int64, device=device)
    for part in parts:
        halves += _halves(part, limit)
    if world is not None:
        world.sum_(halves)
    high, low = halves.double() / 2.0**_BITS
    norm = (high + low / 2.0**_BITS).sqrt() * limit
    return torch.where(largest.isfinite(), norm, torch.inf).float()


def _power_of_two(largest: Tensor) -> Tensor:
    """Return the least power of two above a finite number, an fp64 scalar; 1 for zero."""
    mantissa, _ = torch.frexp(largest.double())
    return torch.where(largest > 0, largest.double() / mantissa, 1.0)


def _halves(part: Tensor, limit: Tensor) -> Tensor:
    """Return the sums of both halves of the squares of ``part / limit``, int64 ``[2]``."""
    square = part.double().div_(limit).square_().mul_(2.0**_BITS)  # exact: 48 bits of 53
    high = square.floor()
    low = square.sub_(high).mul_(2.0**_BITS)
    return torch.stack([high.long().sum(), low.long().sum()])


class ExactNorm:
    """``exact_norm`` of a flat gradient, for ``Update``: it is taken once all of it has arrived."""

    def __init__(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def add(self, end: int) -> None:
        """Wait for the rest."""

    def take(self) -> Tensor:
        """Return the norm, an fp32 scalar."""
        return exact_norm([self._gradient], self._gradient.device)
