"""The tanh form of GELU, whose output and gradient are operands of FP8 products; see ``fastdiff_kernels.gelu``.

Bytes per element of 16 bits: forward 2 read, backward 4, and 1 written per form in FP8, 2 for the plain one; backward
8 / 64 more for the partial sums of the bias's gradient.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.bias_gradient import fold
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.fp8.tiles import TILE, empty, tiles, write_tile
from fastdiff_kernels.fp8.values import Form, Quantised, by_form, quantise, validate
from fastdiff_kernels.gelu import curve, slope
from fastdiff_kernels.launch import jit, run, tl
from fastdiff_kernels.names import Backend


def gelu_reference(u: Tensor, unit: Tensor, form: Form) -> Quantised:
    """``gelu`` in plain torch."""
    return quantise(F.gelu(u.float(), approximate="tanh"), unit, form, u.dtype)


def gelu_backward_reference(dy: Tensor, u: Tensor, unit: Tensor, form: Form) -> tuple[Quantised, Tensor]:
    """``gelu_backward`` in plain torch."""
    up, wide = dy.float(), u.float()
    square, root = wide * wide, math.sqrt(2 / math.pi)
    sigmoid = torch.sigmoid(2 * root * wide * (1 + 0.044715 * square))
    slopes = sigmoid + 2 * root * wide * (1 + 3 * 0.044715 * square) * sigmoid * (1 - sigmoid)
    du = up * slopes
    return quantise(du, unit, form, u.dtype), du.sum(0).to(u.dtype)


@jit
def fp8_gelu_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, columns_ptr, plain_ptr, maxima_ptr, u_ptr, unit_ptr, rows, columns, BLOCK: tl.constexpr
):
    """GELU of a tile of ``BLOCK`` rows and columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    u = tl.load(u_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    write_tile(rows_ptr, columns_ptr, plain_ptr, maxima_ptr, curve(u), unit_ptr, row, column, rows, columns)


@jit
def fp8_gelu_backward_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, columns_ptr, plain_ptr, maxima_ptr, sums_ptr, dy_ptr, u_ptr, unit_ptr, rows, columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of ``BLOCK`` rows and columns of u, and the sums of its columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    u = tl.load(u_ptr + at, mask=inside, other=0.0).to(tl.float32)
    du = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32) * slope(u)
    write_tile(rows_ptr, columns_ptr, plain_ptr, maxima_ptr, du, unit_ptr, row, column, rows, columns)
    out = tl.program_id(0).to(tl.int64) * columns + column
    tl.store(sums_ptr + out, tl.sum(du, axis=0), mask=column < columns)


@torch.library.custom_op("fastdiff::fp8_gelu", mutates_args=())
def _gelu(u: Tensor, unit: Tensor, form: list[bool]) -> list[Tensor]:
    """``[maxima, rows, columns, plain]``, of the last three those asked for."""
    outputs: list[Tensor] = _empty(u, unit, form)
    maxima, written = outputs[0], by_form(outputs[1:], form)
    run(fp8_gelu_kernel, tiles(u), *written, maxima, u.contiguous(), unit, *u.shape, BLOCK=TILE, num_warps=4)
    return outputs


@_gelu.register_fake
def _empty(u: Tensor, unit: Tensor, form: list[bool]) -> list[Tensor]:
    return empty(u, form)


@torch.library.custom_op("fastdiff::fp8_gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, u: Tensor, unit: Tensor, form: list[bool]) -> list[Tensor]:
    """``[dbias, maxima, rows, columns, plain]``, of the last three those asked for."""
    outputs: list[Tensor] = _empty_gradients(dy, u, unit, form)
    dbias, maxima, *rest = outputs
    grid = tiles(u)
    sums = u.new_empty((grid[0], u.shape[1]), dtype=torch.float32)
    run(
        fp8_gelu_backward_kernel, grid, *by_form(rest, form), maxima, sums, dy.contiguous(), u.contiguous(), unit,
        *u.shape, BLOCK=TILE, num_warps=4,
    )  # fmt: skip
    fold(sums, dbias)
    return outputs


@_gelu_backward.register_fake
def _empty_gradients(dy: Tensor, u: Tensor, unit: Tensor, form: list[bool]) -> list[Tensor]:
    return [u.new_empty(u.shape[1]), *empty(u, form)]


def gelu(u: Tensor, unit: Tensor, form: Form, *, backend: Backend | None = None) -> Quantised:
    """GELU as an operand.

    Args:
        u: ``[N, C]`` fp32, bf16 or fp16.
        unit: scale of the operand, fp32 ``[]``, a power of two.
        form: what to write.
        backend: implementation; None: that of ``adaln``.

    Raises:
        ValueError: see ``validate``, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    validate("[N, C]", unit, u=u)
    chosen = choose("adaln", u, backend)
    if chosen != "triton":
        found: Quantised = plain(gelu_reference, chosen)(u, unit, form)
        return found
    maxima, *written = _gelu(u, unit, list(form))
    return Quantised(*by_form(written, form), unit, maxima)


def gelu_backward(
    dy: Tensor, u: Tensor, unit: Tensor, form: Form, *, backend: Backend | None = None
) -> tuple[Quantised, Tensor]:
    """Gradient of GELU's input as an operand, and its sum over rows, the gradient of the bias in ``u``.

    Args:
        dy: gradient of the output, ``[N, C]``.
        u: as in ``gelu``, and so are the other arguments and the errors.
        unit: scale of the gradient.
        form: what to write.
        backend: implementation.

    Returns:
        The gradient ``[N, C]``, and its sum ``[C]`` in the dtype of ``u``.
    """
    validate("[N, C]", unit, u=u, dy=dy)
    chosen = choose("adaln", u, backend)
    if chosen != "triton":
        found: tuple[Quantised, Tensor] = plain(gelu_backward_reference, chosen)(dy, u, unit, form)
        return found
    dbias, maxima, *written = _gelu_backward(dy, u, unit, list(form))
    return Quantised(*by_form(written, form), unit, maxima), dbias
