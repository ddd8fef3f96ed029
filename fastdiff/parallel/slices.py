"""Gradients of all ranks for the slices of one, added up in the order of the ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fastdiff.parallel.world import World


def exchange(slices: Tensor, sizes: Sequence[int], world: World) -> Tensor:
    """Send each rank its slice; return those that all ranks have sent to this one, ``[ranks, own size]``.

    Args:
        slices: of all ranks, one behind the other, ``[N]``.
        sizes: their elements.
        world: the ranks.
    """
    own = sizes[world.rank]
    if world.size == 1:
        return slices.view(1, own)
    found = slices.new_empty(world.size, own)
    dist.all_to_all_single(found.view(-1), slices, [own] * world.size, list(sizes))
    return found


def add_in_order(sums: Sequence[Tensor], found: Tensor, *, begins: bool) -> None:
    """Add what ``exchange`` found to the sums, rank after rank.

    Args:
        sums: of this rank's slice, in their order, any dtype; together as long as a row of ``found``, maybe none.
        found: ``[ranks, N]``.
        begins: overwrite the sums with the first.
    """
    if not sums:
        return
    sizes = [each.numel() for each in sums]
    for rank, gradients in enumerate(torch.split(row, sizes) for row in found):
        add = torch._foreach_copy_ if begins and rank == 0 else torch._foreach_add_
        add(list(sums), list(gradients))
