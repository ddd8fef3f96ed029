"""A matrix in 16 or 32 bits as an operand of FP8 products: the attention's output, and the weights.

Bytes per element of 16 bits: 2 read, and 1 written per form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.fp8.rounding import inverse, largest, magnitude, to_e4m3
from fastdiff_kernels.fp8.values import E4M3, Form, Quantised, quantise
from fastdiff_kernels.launch import jit, run, tl
from fastdiff_kernels.names import Backend

_BLOCK = 64
"""Rows and columns of a tile."""


def cast_reference(x: Tensor, scale: Tensor, form: Form) -> Quantised:
    """``cast`` in plain torch."""
    return quantise(x, scale, form, x.dtype)


@jit
def fp8_cast_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, columns_ptr, maxima_ptr, x_ptr, scale_ptr, rows, columns, BLOCK: tl.constexpr
):
    """One program casts a tile of ``BLOCK`` rows and columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    numbers = to_e4m3(x * inverse(scale_ptr))
    if rows_ptr is not None:
        tl.store(rows_ptr + row[:, None] * columns + column[None, :], numbers, mask=inside)
    if columns_ptr is not None:
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(columns_ptr + column[:, None].to(tl.int64) * rows + row[None, :], tl.trans(numbers), mask=turned)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(maxima_ptr + program, largest(magnitude(x)))


@torch.library.custom_op("fastdiff::fp8_cast", mutates_args=())
def _cast_triton(x: Tensor, scale: Tensor, rows: bool, columns: bool) -> list[Tensor]:
    """``[maxima, rows if asked for, columns if asked for]``."""
    outputs: list[Tensor] = _empty(x, scale, rows, columns)
    maxima, *written = outputs
    first, second = (written[0] if rows else None), (written[-1] if columns else None)
    grid = _grid(x)
    run(fp8_cast_kernel, grid, first, second, maxima, x.contiguous(), scale, *x.shape, BLOCK=_BLOCK, num_warps=4)
    return outputs


@_cast_triton.register_fake
def _empty(x: Tensor, scale: Tensor, rows: bool, columns: bool) -> list[Tensor]:
    grid = _grid(x)
    shapes = [tuple(x.shape)] * rows + [(x.shape[1], x.shape[0])] * columns
    return [x.new_empty(grid[0] * grid[1], dtype=torch.float32), *(x.new_empty(shape, dtype=E4M3) for shape in shapes)]


def _grid(x: Tensor) -> tuple[int, int]:
    return -(-x.shape[0] // _BLOCK), -(-x.shape[1] // _BLOCK)


def cast(x: Tensor, scale: Tensor, form: Form, *, backend: Backend | None = None) -> Quantised:
    """Return a matrix as an operand.

    Args:
        x: ``[N, C]`` fp32, bf16 or fp16; the plain form is ``x`` itself, made contiguous.
        scale: fp32 ``[]``, a power of two.
        form: what to write.
        backend: implementation; None: the default of ``dispatch.choose``.

    Raises:
        ValueError: another number of axes, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [N, C]")
    chosen = choose("adaln", x, backend)
    if chosen != "triton":
        found: Quantised = plain(cast_reference, chosen)(x, scale, form)
        return found
    maxima, *written = _cast_triton(x, scale, form.rows, form.columns)
    return Quantised(
        written[0] if form.rows else None,
        written[-1] if form.columns else None,
        x.contiguous() if form.plain else None,
        scale,
        maxima,
    )
