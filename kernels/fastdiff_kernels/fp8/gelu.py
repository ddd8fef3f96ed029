"""The tanh form of GELU, whose output and gradient are operands of FP8 products; see ``bias_gradient`` for formulas."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.fp8.values import Form, Quantised, quantise


def gelu_reference(u: Tensor, unit: Tensor, form: Form) -> Quantised:
    """``gelu`` in plain torch."""
    return quantise(F.gelu(u.float(), approximate="tanh"), unit, form, u.dtype)


def gelu(u: Tensor, unit: Tensor, form: Form) -> Quantised:
    """GELU of ``u [N, C]`` as an operand; ``unit``: its scale, fp32 ``[]``."""
    return gelu_reference(u, unit, form)


def gelu_backward_reference(dy: Tensor, u: Tensor, unit: Tensor, form: Form) -> tuple[Quantised, Tensor]:
    """``gelu_backward`` in plain torch."""
    up, wide = dy.float(), u.float()
    square, root = wide * wide, math.sqrt(2 / math.pi)
    sigmoid = torch.sigmoid(2 * root * wide * (1 + 0.044715 * square))
    slope = sigmoid + 2 * root * wide * (1 + 3 * 0.044715 * square) * sigmoid * (1 - sigmoid)
    du = up * slope
    return quantise(du, unit, form, u.dtype), du.sum(0).to(u.dtype)


def gelu_backward(dy: Tensor, u: Tensor, unit: Tensor, form: Form) -> tuple[Quantised, Tensor]:
    """Gradient of ``u [N, C]`` as an operand, and its sum over rows ``[C]``, the gradient of the bias in ``u``."""
    return gelu_backward_reference(dy, u, unit, form)
