"""Gradients of queries, keys and values joined to that of their packed projection, an operand of FP8 products."""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff_kernels.fp8.cast import cast
from fastdiff_kernels.fp8.values import Form, Quantised, quantise


def join_reference(dq: Tensor, dk: Tensor, dv: Tensor, unit: Tensor, form: Form) -> tuple[Quantised, Tensor]:
    """``join`` in plain torch."""
    joined = torch.stack([dq, dk, dv], dim=2).permute(0, 3, 2, 1, 4)  # [B, H, 3, T, D] -> [B, T, 3, H, D]
    packed = joined.flatten(2).flatten(0, 1)  # -> [B * T, 3 * H * D]
    return quantise(packed, unit, form, dq.dtype), packed.float().sum(0).to(dq.dtype)


def join(dq: Tensor, dk: Tensor, dv: Tensor, unit: Tensor, form: Form) -> tuple[Quantised, Tensor]:
    """Join 3 x ``[B, H, T, D]``, of any strides, to ``[B * T, 3 * H * D]``, and sum its rows ``[3 * H * D]``."""
    return join_reference(dq, dk, dv, unit, form)


def join_packed(dqkv: Tensor, unit: Tensor, form: Form) -> tuple[Quantised, Tensor]:
    """``join`` of a gradient ``[B, T, 3, H, D]`` that is packed already."""
    packed = dqkv.flatten(2).flatten(0, 1)
    return cast(packed, unit, form), packed.sum(0)
