"""Gradients of queries, keys and values joined to that of their packed projection, an operand of FP8 products.

Bytes per element of 16 bits: 2 read, 1 written per form in e4m3 and 2 of the plain form; of the sums 8 / R, where R is
the number of rows that one program works through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff_kernels.bias_gradient import fold
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.fp8.rounding import inverse, largest, magnitude, to_e4m3
from fastdiff_kernels.fp8.values import E4M3, Form, Quantised, quantise
from fastdiff_kernels.launch import jit, processors, run, tl
from fastdiff_kernels.names import Backend

_BLOCK = 64
"""Rows and columns of a tile."""
_PROGRAMS_PER_PROCESSOR = 8


def join_reference(dq: Tensor, dk: Tensor, dv: Tensor, unit: Tensor, form: Form) -> tuple[Quantised, Tensor]:
    """``join`` in plain torch."""
    joined = torch.stack([dq, dk, dv], dim=2).permute(0, 3, 2, 1, 4)  # [B, H, 3, T, D] -> [B, T, 3, H, D]
    packed = joined.flatten(2).flatten(0, 1)  # -> [B * T, 3 * H * D]
    return quantise(packed, unit, form, dq.dtype), packed.float().sum(0).to(dq.dtype)


@jit
def _join_part(  # type: ignore[no-untyped-def]
    rows_ptr, columns_ptr, plain_ptr, sums_ptr, part_ptr, scale, total, rows, length, stride,
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
        numbers = to_e4m3(value * scale)
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
    rows_ptr, columns_ptr, plain_ptr, maxima_ptr, sums_ptr, dq_ptr, dk_ptr, dv_ptr, scale_ptr, total, rows, length,
    q_stride, k_stride, v_stride, Q_H: tl.constexpr, Q_T: tl.constexpr, K_H: tl.constexpr, K_T: tl.constexpr,
    V_H: tl.constexpr, V_T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes ``rows`` tokens of a block of columns of one of the gradients."""
    scale = inverse(scale_ptr)
    part = tl.program_id(2)
    if part == 0:
        most = _join_part(
            rows_ptr, columns_ptr, plain_ptr, sums_ptr, dq_ptr, scale, total, rows, length, q_stride,
            Q_H, Q_T, 0, H, D, BLOCK,
        )  # fmt: skip
    elif part == 1:
        most = _join_part(
            rows_ptr, columns_ptr, plain_ptr, sums_ptr, dk_ptr, scale, total, rows, length, k_stride,
            K_H, K_T, 1, H, D, BLOCK,
        )  # fmt: skip
    else:
        most = _join_part(
            rows_ptr, columns_ptr, plain_ptr, sums_ptr, dv_ptr, scale, total, rows, length, v_stride,
            V_H, V_T, 2, H, D, BLOCK,
        )  # fmt: skip
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 3 + part
    tl.store(maxima_ptr + program, most)


def _plan(like: Tensor) -> tuple[int, tuple[int, int, int]]:
    """Rows per program, and the grid over rows, columns and parts, for gradients ``[B, H, T, D]``."""
    batch, heads, length, width = like.shape
    total, blocks = batch * length, -(-heads * width // _BLOCK)
    programs = max(processors(like) * _PROGRAMS_PER_PROCESSOR // (3 * blocks), 1)
    tiles = max(-(-total // (programs * _BLOCK)), 1)
    return tiles * _BLOCK, (-(-total // (tiles * _BLOCK)), blocks, 3)


@torch.library.custom_op("fastdiff::fp8_join", mutates_args=())
def _join_triton(
    dq: Tensor, dk: Tensor, dv: Tensor, scale: Tensor, rows: bool, columns: bool, as_given: bool
) -> list[Tensor]:
    """``[maxima, dbias, and of rows, columns and the plain form what is asked for]``."""
    outputs: list[Tensor] = _joined(dq, dk, dv, scale, rows, columns, as_given)
    maxima, dbias, *written = outputs
    targets = [written.pop(0) if asked else None for asked in (rows, columns, as_given)]
    parts = [part if part.stride(3) == 1 else part.contiguous() for part in (dq, dk, dv)]
    batch, heads, length, width = dq.shape
    each, grid = _plan(dq)
    sums = dq.new_empty((grid[0], dbias.numel()), dtype=torch.float32)
    # Strides are constants, because Triton knows the alignment of multiples of 16 alone.
    strides = {
        f"{n}_{axis}": p.stride(i) for n, p in zip("QKV", parts, strict=True) for axis, i in (("H", 1), ("T", 2))
    }
    run(
        fp8_join_kernel, grid, *targets, maxima, sums, *parts, scale, batch * length, each, length,
        *(p.stride(0) for p in parts), **strides, H=heads, D=width, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    fold(sums, dbias)
    return outputs


@_join_triton.register_fake
def _joined(
    dq: Tensor, dk: Tensor, dv: Tensor, scale: Tensor, rows: bool, columns: bool, as_given: bool
) -> list[Tensor]:
    batch, heads, length, width = dq.shape
    across, _, grid = 3 * heads * width, *_plan(dq)
    shape, turned = (batch * length, across), (across, batch * length)
    maxima = dq.new_empty(max(grid[0] * grid[1] * grid[2], 1), dtype=torch.float32)
    numbers = [dq.new_empty(s, dtype=E4M3) for s, asked in ((shape, rows), (turned, columns)) if asked]
    return [maxima, dq.new_empty(across), *numbers, *([dq.new_empty(shape)] if as_given else [])]


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
    """
    chosen = choose("adaln", dq, backend)
    if chosen != "triton":
        found: tuple[Quantised, Tensor] = plain(join_reference, chosen)(dq, dk, dv, unit, form)
        return found
    maxima, dbias, *written = _join_triton(dq, dk, dv, unit, form.rows, form.columns, form.plain)
    rows, columns, given = (written.pop(0) if asked else None for asked in form)
    return Quantised(rows, columns, given, unit, maxima), dbias


def join_packed(dqkv: Tensor, unit: Tensor, form: Form) -> tuple[Quantised, Tensor]:
    """``join`` of a gradient ``[B, T, 3, H, D]`` that is packed already, and is the plain form itself."""
    dq, dk, dv = dqkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, T, 3, H, D] -> 3 x [B, H, T, D]
    operand, dbias = join(dq, dk, dv, unit, form._replace(plain=False))
    given = dqkv.flatten(2).flatten(0, 1) if form.plain else None
    return operand._replace(plain=given), dbias
