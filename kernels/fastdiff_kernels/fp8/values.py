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
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    unit: Tensor
    """Scale, fp32 ``[]``, a power of two: a value is a number times this."""
    maxima: Tensor
    """fp32 ``[P]``, P >= 1: maxima of the absolute values before rounding, over parts of the matrix; NaN where
    there is one."""


class Kept(NamedTuple):
    """What the gradient of a weight needs of an operand; see ``Quantised``."""

    columns: Tensor | None
    plain: Tensor | None
    unit: Tensor


def validate(axes: str, unit: Tensor, **given: Tensor) -> None:
    """Refuse arguments that a kernel would read past their end, or of which there is no maximum.

    Args:
        axes: those of each tensor, such as ``[N, C]``.
        unit: scale of the operand, fp32 of one number.
        given: tensors by name, alike; fp32, bf16 or fp16.

    Raises:
        ValueError: something else was given.
    """
    (first, like), *others = given.items()
    if like.dim() != axes.count(",") + 1 or like.numel() == 0:
        raise ValueError(f"{first} has shape {tuple(like.shape)}, expected {axes}, none of them 0")
    if like.dtype not in _DTYPES:
        raise ValueError(f"{first} is {like.dtype}, expected float32, bfloat16 or float16")
    for name, other in others:
        if (other.shape, other.dtype, other.device) != (like.shape, like.dtype, like.device):
            raise ValueError(f"{name} is {_in_words(other)}, expected that of {first}, {_in_words(like)}")
    if unit.numel() != 1 or (unit.dtype, unit.device) != (torch.float32, like.device):
        raise ValueError(f"unit is {_in_words(unit)}, expected one number, torch.float32 on {like.device}")


def expect(**given: tuple[Tensor, torch.dtype, torch.Size]) -> None:
    """Raise ValueError if one of the tensors, by name, is not of its dtype and shape."""
    for name, (tensor, dtype, shape) in given.items():
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise ValueError(f"{name} is {_in_words(tensor)}, expected {dtype} {tuple(shape)}")


def _in_words(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def quantise(values: Tensor, unit: Tensor, form: Form, dtype: torch.dtype) -> Quantised:
    """Round values to the forms of an operand.

    Args:
        values: ``[N, C]``, fp32 before any rounding, or in 16 bits.
        unit: scale, fp32 ``[]``, a power of two.
        form: what to return.
        dtype: of the plain form.
    """
    rows = columns = None
    if form.rows or form.columns:
        numbers = (values.float() * (1.0 / unit)).clamp(-LARGEST, LARGEST).to(E4M3)
        rows = numbers.contiguous() if form.rows else None
        columns = numbers.t().contiguous() if form.columns else None
    plain = values.to(dtype).contiguous() if form.plain else None
    return Quantised(rows, columns, plain, unit, values.abs().amax().float().view(1))


def blank(like: Tensor, shape: tuple[int, int], form: Sequence[bool]) -> list[Tensor]:
    """Return memory for the forms of a matrix that are asked for; ``like`` has the dtype of the plain one."""
    shapes = ((shape, E4M3), (shape[::-1], E4M3), (shape, like.dtype))
    return [like.new_empty(shape, dtype=dtype) for (shape, dtype), asked in zip(shapes, form, strict=True) if asked]


def by_form(written: Sequence[Tensor], form: Sequence[bool]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return rows, columns and plain of those that were asked for; None: it was not."""
    remaining = iter(written)
    rows, columns, plain = (next(remaining) if asked else None for asked in form)
    return rows, columns, plain


def dequantised(numbers: Tensor, unit: Tensor) -> Tensor:
    """Return the values of e4m3 numbers in fp32."""
    return numbers.float() * unit


def folded(maxima: Sequence[Tensor]) -> Tensor:
    """Return the maximum of each, fp32 ``[n]``."""
    return torch.stack([parts.amax() for parts in maxima])
