"""A matrix in 16 or 32 bits as an operand of FP8 products: the attention's output, and the weights.

Bytes per element of 16 bits: 2 read, and 1 written per form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.fp8.tiles import TILE, empty, tiles, write_tile
from fastdiff_kernels.fp8.values import Form, Quantised, by_form, quantise, validate
from fastdiff_kernels.launch import jit, run, tl
from fastdiff_kernels.names import Backend


def cast_reference(x: Tensor, unit: Tensor, form: Form) -> Quantised:
    """``cast`` in plain torch."""
    return quantise(x, unit, form, x.dtype)


@jit
def fp8_cast_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, columns_ptr, maxima_ptr, x_ptr, unit_ptr, rows, columns, BLOCK: tl.constexpr
):
    """One program casts a tile of ``BLOCK`` rows and columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    write_tile(rows_ptr, columns_ptr, None, maxima_ptr, x, unit_ptr, row, column, rows, columns)


@torch.library.custom_op("fastdiff::fp8_cast", mutates_args=())
def _cast_triton(x: Tensor, unit: Tensor, form: list[bool]) -> list[Tensor]:
    """``[maxima, rows, columns]``, of the last two those asked for."""
    outputs: list[Tensor] = _empty(x, unit, form)
    rows, columns, _ = by_form(outputs[1:], form)
    run(fp8_cast_kernel, tiles(x), rows, columns, outputs[0], x.contiguous(), unit, *x.shape, BLOCK=TILE, num_warps=4)
    return outputs


@_cast_triton.register_fake
def _empty(x: Tensor, unit: Tensor, form: list[bool]) -> list[Tensor]:
    return empty(x, form)


def cast(x: Tensor, unit: Tensor, form: Form, *, backend: Backend | None = None) -> Quantised:
    """Return a matrix as an operand.

    Args:
        x: ``[N, C]`` fp32, bf16 or fp16; the plain form is ``x`` itself, made contiguous.
        unit: scale of the operand, fp32 ``[]``, a power of two.
        form: what to write.
        backend: implementation; None: that of ``adaln``.

    Raises:
        ValueError: see ``validate``, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    validate("[N, C]", unit, x=x)
    chosen = choose("adaln", x, backend)
    if chosen != "triton":
        found: Quantised = plain(cast_reference, chosen)(x, unit, form)
        return found
    numbers = list(form._replace(plain=False))
    maxima, *written = _cast_triton(x, unit, numbers)
    rows, columns, _ = by_form(written, numbers)
    return Quantised(rows, columns, x.contiguous() if form.plain else None, unit, maxima)
