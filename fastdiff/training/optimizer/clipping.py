"""Norm of the gradient in one pass, and the factor that clips it; neither is read by the host."""

from collections.abc import Sequence

import torch
from torch import Tensor


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all ``tensors`` (of one device, any shapes) as a scalar; fp32 sums of squares.

    It is infinite or NaN if one of their elements is, or if an fp32 sum of squares overflows: above 1.8e19.
    """
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2.0, torch.float32)))
    return norm


def clip_factor(norm: Tensor, limit: float, scale: float = 1.0) -> Tensor:
    """Return the factor by which a gradient is multiplied, a scalar on the device of ``norm``.

    Args:
        norm: of ``scale`` times the gradient, a scalar.
        limit: norm that the gradient has at most afterwards; above 0.
        scale: factor of the loss.
    """
    factor = 1.0 / ((norm if scale == 1.0 else norm / scale) + 1e-6).div(limit).clamp(min=1.0)
    return factor if scale == 1.0 else factor / scale
