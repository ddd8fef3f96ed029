"""Operands of FP8 products, and their quantisation in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 448.0
"""The largest e4m3 number; larger values become it, NaN stays NaN."""
E4M3 = torch.float8_e4m3fn
MULTIPLE = 16
"""Divisor of the last two axes of a product."""


class Form(NamedTuple):
    """What an op writes of a matrix ``[N, C]``."""

    rows: bool = False
    """e4m3 ``[N, C]``."""
    columns: bool = False
    """e4m3 ``[C, N]``, the transpose."""
    plain: bool = False
    """``[N, C]`` in the dtype of the network."""


class Quantised(NamedTuple):
    """A matrix ``[N, C]`` in the forms that were asked for; the others are None. All are contiguous."""

    rows: Tensor | None
    columns: Tensor | None
    plain: Tensor | None
    scale: Tensor
    """fp32 ``[]``, a power of two: a value is a number times this."""
    maxima: Tensor
    """fp32 ``[P]``, P >= 1: maxima of the absolute values before rounding, over parts of the matrix; NaN where
    there is one."""


def quantise(values: Tensor, scale: Tensor, form: Form, dtype: torch.dtype) -> Quantised:
    """Round values to the forms of an operand.

    Args:
        values: ``[N, C]``, fp32 before any rounding, or in 16 bits.
        scale: fp32 ``[]``, a power of two.
        form: what to return.
        dtype: of the plain form.
    """
    rows = columns = None
    if form.rows or form.columns:
        numbers = (values.float() * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(E4M3)
        rows = numbers.contiguous() if form.rows else None
        columns = numbers.t().contiguous() if form.columns else None
    plain = values.to(dtype).contiguous() if form.plain else None
    return Quantised(rows, columns, plain, scale, values.abs().amax().float().view(1))


def blank(like: Tensor, shape: tuple[int, int], form: Sequence[bool]) -> list[Tensor]:
    """Return memory for the forms of a matrix that are asked for; ``like`` has the dtype of the plain one."""
    shapes = ((shape, E4M3), (shape[::-1], E4M3), (shape, like.dtype))
    return [like.new_empty(shape, dtype=dtype) for (shape, dtype), asked in zip(shapes, form, strict=True) if asked]


def by_form(written: Sequence[Tensor], form: Sequence[bool]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return rows, columns and plain of those that were asked for; None: it was not."""
    remaining = iter(written)
    rows, columns, plain = (next(remaining) if asked else None for asked in form)
    return rows, columns, plain


def kept(columns: Tensor | None, plain: Tensor | None, scale: Tensor) -> Quantised:
    """Return what the gradient of a weight needs of an operand."""
    return Quantised(None, columns, plain, scale, scale.view(1))


def dequantised(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return the values of e4m3 numbers in fp32."""
    return numbers.float() * scale


def folded(maxima: Sequence[Tensor]) -> Tensor:
    """Return the maximum of each, fp32 ``[n]``."""
    return torch.stack([parts.amax() for parts in maxima])
