"""Exponential moving averages of the weights inside an optimizer step: ``average += share * (weights - average)``.

A share from 1/2 on is counted from the weights, ``weights - (1 - share) * (weights - average)``, as torch's ``lerp``
does, so that a share of 1 gives the weights themselves. Each operation is rounded on its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff_kernels.launch import jit, tl


def averaged_reference(old: Tensor, weights: Tensor, share: Tensor) -> Tensor:
    """The new average of fp32 ``old`` and ``weights``, same shape; ``share`` fp32 scalar in [0, 1]."""
    small = share < 0.5
    base = torch.where(small, old, weights)
    return base + (weights - old) * torch.where(small, share, share - 1)


@jit
def update_averages(averages_ptr, shares_ptr, place, mask, weights):  # type: ignore[no-untyped-def]
    """Update each of a tuple of averages at ``place`` where ``mask``, by its number in ``shares_ptr``."""
    for k in tl.static_range(len(averages_ptr)):
        average_ptr = averages_ptr[k]
        share = tl.load(shares_ptr + k)
        old = tl.load(average_ptr + place, mask=mask, other=0)
        small = share < 0.5
        new = tl.where(small, old, weights) + (weights - old) * tl.where(small, share, share - 1)
        tl.store(average_ptr + place, new, mask=mask)
