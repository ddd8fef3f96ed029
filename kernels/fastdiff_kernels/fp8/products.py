"""The three products of a linear layer whose operands are in FP8, or in 16 bits where they have no FP8 form.

On a CPU they are fp32 products of the dequantised numbers. ``torch._scaled_mm`` of a CPU takes layouts that a GPU
refuses, so shapes and strides are checked here, on every device; strides not in compiled code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.fp8.values import E4M3, MULTIPLE, Kept, Quantised, dequantised


def output(x: Quantised, weight: Quantised, bias: Tensor | None = None) -> Tensor:
    """``x W^T + bias``: ``x [N, K]``, ``weight [M, K]``, ``bias [M]`` -> ``[N, M]``.

    Sums of the tensor cores have 14 bits here, in the gradients 32 (``use_fast_accum``).
    """
    if x.rows is not None and weight.rows is not None:
        return product(x.rows, weight.rows, x.unit, weight.unit, bias=bias, fast=True)
    return F.linear(_plain(x), _plain(weight), bias)


def input_gradient(dy: Quantised, weight: Quantised) -> Tensor:
    """``dy W``: ``dy [N, M]``, ``weight [M, K]`` -> ``[N, K]``."""
    if dy.rows is not None and weight.columns is not None:
        return product(dy.rows, weight.columns, dy.unit, weight.unit)
    return _plain(dy) @ _plain(weight)


def weight_gradient(dy: Quantised | Kept, x: Quantised | Kept) -> Tensor:
    """``dy^T x``: ``dy [N, M]``, ``x [N, K]`` -> ``[M, K]``; in FP8 if both have columns."""
    if dy.columns is not None and x.columns is not None:
        return product(dy.columns, x.columns, dy.unit, x.unit)
    return _plain(dy).t() @ _plain(x)


def product(
    a: Tensor, b: Tensor, unit_a: Tensor, unit_b: Tensor, *, bias: Tensor | None = None, fast: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """``unit_a * unit_b * a b^T + bias``.

    Args:
        a: e4m3 ``[N, K]``, contiguous, K a multiple of 16.
        b: e4m3 ``[M, K]``, contiguous, M a multiple of 16.
        unit_a: scale of a, fp32 ``[]``.
        unit_b: scale of b, fp32 ``[]``.
        bias: ``[M]`` in ``dtype``; None: none.
        fast: add up in the registers of the tensor cores, with fewer bits.
        dtype: of the result.

    Returns:
        ``[N, M]``.

    Raises:
        ValueError: another dtype, shape or layout.
    """
    _validate(a, b)
    if a.device.type != "cpu":
        # Inductor of torch 2.13 fails to add the two axes itself to scales that are views.
        scales = {"scale_a": unit_a.view(1, 1), "scale_b": unit_b.view(1, 1)}
        return torch._scaled_mm(a, b.t(), **scales, bias=bias, out_dtype=dtype, use_fast_accum=fast)
    out = dequantised(a, unit_a) @ dequantised(b, unit_b).t()
    return (out if bias is None else out + bias.float()).to(dtype)


def _plain(operand: Quantised | Kept) -> Tensor:
    if operand.plain is None:
        raise ValueError("an operand has neither the FP8 form that the product takes nor its plain form")
    return operand.plain


def _validate(a: Tensor, b: Tensor) -> None:
    for name, given in (("a", a), ("b", b)):
        if given.dtype != E4M3 or given.dim() != 2:
            raise ValueError(f"{name} is {given.dtype} {tuple(given.shape)}, expected {E4M3} of two axes")
        # Dynamo copies all gradients that a backward pass gets if that pass asks for strides.
        if not torch.compiler.is_compiling() and not given.is_contiguous():
            raise ValueError(
                f"{name} has strides {given.stride()}, expected those of a contiguous {tuple(given.shape)}"
            )
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} differ in the last axis, which is summed")
    if a.shape[1] % MULTIPLE or b.shape[0] % MULTIPLE:
        raise ValueError(
            f"a is {tuple(a.shape)} and b {tuple(b.shape)}, expected multiples of {MULTIPLE} in both axes of b"
        )
