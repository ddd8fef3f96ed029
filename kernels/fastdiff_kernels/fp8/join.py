"""Gradients of queries, keys and values joined to that of their packed projection, an operand of FP8 products.

Bytes per element of 16 bits: 2 read, 1 written per form in e4m3 and 2 of the plain form; of the sums 8 / R, where R is
the number of rows that one program works through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff_kernels.bias_gradient import fold, plan, strided
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.fp8.rounding import inverse, largest, magnitude, to_e4m3
from fastdiff_kernels.fp8.tiles import TILE
from fastdiff_kernels.fp8.values import Form, Quantised, blank, by_form, quantise, validate
from fastdiff_kernels.launch import jit, run, tl
from fastdiff_kernels.names import Backend


def join_reference(dq: Tensor, dk: Tensor, dv: Tensor, unit: Tensor, form: Form) -> tuple[Quantised, Tensor]:
    """``join`` in plain torch."""
    joined = torch.stack([dq, dk, dv], dim=2).permute(0, 3, 2, 1, 4)  # [B, H, 3, T, D] -> [B, T, 3, H, D]
    packed = joined.flatten(2).flatten(0, 1)  # -> [B * T, 3 * H * D]
    return quantise(packed, unit, form, dq.dtype), packed.float().sum(0).to(dq.dtype)


@jit
def _join_part(  # type: ignore[no-untyped-def]
    rows_ptr, columns_ptr, plain_ptr, sums_ptr, part_ptr, inverse_unit, total, rows, length, stride,
    STEP_H: tl.constexpr, STEP_T: tl.constexpr, PART: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``rows`` tokens of a block of columns of one gradient, and their sums; return their maximum."""
    start = tl.program_id(0).to(tl.int64) * rows
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real, place = column < H * D, PART * H * D + column
    from_ptr = part_ptr + (column // D * STEP_H + column % D)[None, :]
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    most = tl.zeros((BLOCK, BLOCK), tl.int32)
    stop = tl.minimum(start + rows, total)
    for first in range(start, stop, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = (row < stop)[:, None] & real[None, :]
        given = tl.load(
            from_ptr + (row // length * stride + row % length * STEP_T)[:, None], mask=inside, other=0.0
        )  # fmt: skip
        value = given.to(tl.float32)
        at = row[:, None] * (3 * H * D) + place[None, :]
        numbers = to_e4m3(value * inverse_unit)
        if rows_ptr is not None:
            tl.store(rows_ptr + at, numbers, mask=inside)
        if columns_ptr is not None:
            turned = real[:, None] & (row < stop)[None, :]
            tl.store(columns_ptr + place[:, None].to(tl.int64) * total + row[None, :], tl.trans(numbers), mask=turned)
        if plain_ptr is not None:
            tl.store(plain_ptr + at, given, mask=inside)
        sums += value
        most = tl.maximum(most, magnitude(value))
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * (3 * H * D) + place, tl.sum(sums, axis=0), mask=real)
    return largest(most)


@jit
def fp8_join_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, columns_ptr, plain_ptr, maxima_ptr, sums_ptr, dq_ptr, dk_ptr, dv_ptr, unit_ptr, total, rows, length,
    q_stride, k_stride, v_stride, Q_H: tl.constexpr, Q_T: tl.constexpr, K_H: tl.constexpr, K_T: tl.constexpr,
    V_H: tl.constexpr, V_T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes ``rows`` tokens of a block of columns of one of the gradients."""
    inverse_unit = inverse(unit_ptr)
    part = tl.program_id(2)
    if part == 0:
        most = _join_part(
            rows_ptr, columns_ptr, plain_ptr, sums_ptr, dq_ptr, inverse_unit, total, rows, length, q_stride,
            Q_H, Q_T, 0, H, D, BLOCK,
        )  # fmt: skip
    elif part == 1:
        most = _join_part(
            rows_ptr, columns_ptr, plain_ptr, sums_ptr, dk_ptr, inverse_unit, total, rows, length, k_stride,
            K_H, K_T, 1, H, D, BLOCK,
        )  # fmt: skip
    else:
        most = _join_part(
            rows_ptr, columns_ptr, plain_ptr, sums_ptr, dv_ptr, inverse_unit, total, rows, length, v_stride,
            V_H, V_T, 2, H, D, BLOCK,
        )  # fmt: skip
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 3 + part
    tl.store(maxima_ptr + program, most)


def _plan(dq: Tensor) -> tuple[int, tuple[int, int, int]]:
    """Rows per program, and the grid over rows, columns and parts, for gradients ``[B, H, T, D]``."""
    batch, heads, length, width = dq.shape
    rows, grid = plan(dq, batch * length, heads * width, block=TILE, parts=3, multiple=TILE)
    return rows, (*grid, 3)


@torch.library.custom_op("fastdiff::fp8_join", mutates_args=())
def _join(dq: Tensor, dk: Tensor, dv: Tensor, unit: Tensor, form: list[bool]) -> list[Tensor]:
    """``[dbias, maxima, rows, columns, plain]``, of the last three those asked for."""
    outputs: list[Tensor] = _empty(dq, dk, dv, unit, form)
    dbias, maxima, *written = outputs
    parts, strides = strided(dq, dk, dv)
    batch, heads, length, width = dq.shape
    rows, grid = _plan(dq)
    sums = dq.new_empty((grid[0], dbias.numel()), dtype=torch.float32)
    run(
        fp8_join_kernel, grid, *by_form(written, form), maxima, sums, *parts, unit, batch * length, rows, length,
        *(p.stride(0) for p in parts), **strides, H=heads, D=width, BLOCK=TILE, num_warps=8,
    )  # fmt: skip
    fold(sums, dbias)
    return outputs


@_join.register_fake
def _empty(dq: Tensor, dk: Tensor, dv: Tensor, unit: Tensor, form: list[bool]) -> list[Tensor]:
    batch, heads, length, width = dq.shape
    across, (_, grid) = 3 * heads * width, _plan(dq)
    maxima = dq.new_empty(grid[0] * grid[1] * grid[2], dtype=torch.float32)
    return [dq.new_empty(across), maxima, *blank(dq, (batch * length, across), form)]


def join(
    dq: Tensor, dk: Tensor, dv: Tensor, unit: Tensor, form: Form, *, backend: Backend | None = None
) -> tuple[Quantised, Tensor]:
    """Join gradients of queries, keys and values to an operand, and sum its rows.

    Args:
        dq: ``[B, H, T, D]``, of any strides, fp32, bf16 or fp16.
        dk: like ``dq``.
        dv: like ``dq``.
        unit: scale of the operand, fp32 ``[]``, a power of two.
        form: what to write of it.
        backend: implementation; None: that of ``adaln``.

    Returns:
        The operand ``[B * T, 3 * H * D]``, and the sum of its rows ``[3 * H * D]``, the gradient of a bias.

    Raises:
        ValueError: see ``validate``, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    validate("[B, H, T, D]", unit, dq=dq, dk=dk, dv=dv)
    chosen = choose("adaln", dq, backend)
    if chosen != "triton":
        found: tuple[Quantised, Tensor] = plain(join_reference, chosen)(dq, dk, dv, unit, form)
        return found
    dbias, maxima, *written = _join(dq, dk, dv, unit, list(form))
    return Quantised(*by_form(written, form), unit, maxima), dbias


def join_packed(dqkv: Tensor, unit: Tensor, form: Form) -> tuple[Quantised, Tensor]:
    """``join`` of a gradient ``[B, T, 3, H, D]`` that is packed already, and is the plain form itself."""
    dq, dk, dv = dqkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, T, 3, H, D] -> 3 x [B, H, T, D]
    operand, dbias = join(dq, dk, dv, unit, form._replace(plain=False))
    given = dqkv.flatten(2).flatten(0, 1) if form.plain else None
    return operand._replace(plain=given), dbias
