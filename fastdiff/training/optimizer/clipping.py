"""Norm of the gradient in one pass, and the factor that clips it; neither is read by the host."""

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor


def norm_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all ``tensors`` (of one device, any shapes) as a scalar; fp32 sums of squares.

    It is infinite or NaN if one of their elements is, or if an fp32 sum of squares overflows: above 1.8e19.
    """
    return _joined(torch._foreach_norm(list(tensors), 2.0, torch.float32))


def _joined(norms: Sequence[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


class ParameterNorms:
    """``norm_of`` the gradients of all parameters in a flat buffer, taken as they arrive; equal to it to the bit.

    Args:
        gradients: by parameter, views of the buffer in its order.
        ends: places in the buffer behind each.
    """

    def __init__(self, gradients: Sequence[Tensor], ends: Sequence[int]) -> None:
        self._gradients, self._ends = gradients, ends
        self._found: list[Tensor] = []

    def add(self, end: int) -> None:
        """Take the norms of the gradients that end at or before element ``end`` and are not taken yet."""
        arrived = self._gradients[len(self._found) : bisect_right(self._ends, end)]
        if arrived:
            self._found += torch._foreach_norm(list(arrived), 2.0, torch.float32)

    def take(self) -> Tensor:
        """Return the norm of all, an fp32 scalar, once they have arrived; begin anew."""
        norm, self._found = _joined(self._found).square().sqrt(), []  # as the ranks of ZeRO add up squares
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
