"""The gradient of a linear layer's bias, summed where the gradient of the layer's output is written.

For ``u = x W^T + bias``, ``[..., C]``, the gradient of the bias is the sum of du over all rows. torch sums it in a pass
of its own, which reads du again. Ops behind the layer write du, and sum it meanwhile: ``gelu.py``, ``geglu.py``, and

    unpacked    q, k, v = u             du = [dq, dk, dv], joined in the order of u

``bias`` is an argument for the sake of its gradient alone: ``u`` contains it, and is computed from ``bias.detach()``.

Bytes moved per element of u in 16 bits, backward: 4 + 8 / R, where R is the number of rows that one program works
through; the least are 4, Inductor moves 6.03. The unpacking is a view. Sums are fp32, of a fixed order.

It runs wherever ``adaln`` runs by its kernels, by the same choice (``dispatch.choose``): both belong to the DiT.

Limits: fp32, bf16 and fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import jit, processors, run, tl, triton
from fastdiff_kernels.names import Backend

BLOCK_COLUMNS = 256
"""Columns that one program of ``plan`` works through."""
_BLOCK_ROWS = 8
_PROGRAMS_PER_PROCESSOR = 8
LEAST_ROWS = 64
"""Least rows of a program of ``plan`` that writes partial sums."""


def unpacked_reference(u: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """``unpacked`` in plain torch, differentiable, in any floating dtype."""
    shifted = None if bias is None else bias.view(3, *u.shape[3:]) if _is_packed(u) else _by_part(bias, u)
    return _views(with_gradient(u, shifted))


def with_gradient(u: Tensor, bias: Tensor | None) -> Tensor:
    """``u`` whose gradient also reaches ``bias``."""
    return u if bias is None else u + (bias - bias.detach())


def _by_part(bias: Tensor, u: Tensor) -> Tensor:
    """``[H * 3 * D]`` in the order of heads ``-> [3, H, D]``."""
    return bias.view(u.shape[3], 3, u.shape[4]).transpose(0, 1)


def _views(u: Tensor) -> tuple[Tensor, ...]:
    return u.permute(2, 0, 3, 1, 4).unbind(0)  # [B, T, 3, H, D] -> 3 x [B, H, T, D]


def _is_packed(u: Tensor) -> bool:
    """Whether the last three axes lie in memory as they are named: parts, heads, channels."""
    return u.stride(2) >= u.stride(3)


@jit
def store_sums(sums_ptr, sums, column, columns):  # type: ignore[no-untyped-def]
    """One row of partial sums."""
    program = tl.program_id(0).to(tl.int64)
    tl.store(sums_ptr + program * columns + column, tl.sum(sums, axis=0), mask=column < columns)


@jit
def bias_gradient_join_kernel(  # type: ignore[no-untyped-def]
    du_ptr, sums_ptr, dq_ptr, dk_ptr, dv_ptr, total, rows, length, q_stride, k_stride, v_stride,
    H: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr, Q_H: tl.constexpr, Q_T: tl.constexpr,
    K_H: tl.constexpr, K_T: tl.constexpr, V_H: tl.constexpr, V_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The three gradients of ``rows`` tokens for a block of columns; heads of u are ``HEAD`` apart, parts ``PART``."""
    start = tl.program_id(0).to(tl.int64) * rows
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    head, channel = column // D, column % D
    stop = tl.minimum(start + rows, total)
    sums_q = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    sums_k, sums_v = sums_q, sums_q
    place = head * HEAD + channel
    for first in range(start, stop, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        sample, token = (row // length)[:, None], (row % length)[:, None]
        inside = (row < stop)[:, None] & (column < H * D)[None, :]
        at = row[:, None] * (3 * H * D) + place[None, :]
        q_at = sample * q_stride + token * Q_T + (head * Q_H + channel)[None, :]
        k_at = sample * k_stride + token * K_T + (head * K_H + channel)[None, :]
        v_at = sample * v_stride + token * V_T + (head * V_H + channel)[None, :]
        q = tl.load(dq_ptr + q_at, mask=inside, other=0.0)
        k = tl.load(dk_ptr + k_at, mask=inside, other=0.0)
        v = tl.load(dv_ptr + v_at, mask=inside, other=0.0)
        tl.store(du_ptr + at, q, mask=inside)
        tl.store(du_ptr + PART + at, k, mask=inside)
        tl.store(du_ptr + 2 * PART + at, v, mask=inside)
        sums_q, sums_k, sums_v = sums_q + q.to(tl.float32), sums_k + k.to(tl.float32), sums_v + v.to(tl.float32)
    out_ptr = sums_ptr + tl.program_id(0).to(tl.int64) * (3 * H * D) + place
    tl.store(out_ptr, tl.sum(sums_q, axis=0), mask=column < H * D)
    tl.store(out_ptr + PART, tl.sum(sums_k, axis=0), mask=column < H * D)
    tl.store(out_ptr + 2 * PART, tl.sum(sums_v, axis=0), mask=column < H * D)


@jit
def bias_gradient_fold_kernel(out_ptr, sums_ptr, programs, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program adds up a block of columns of the partial sums, in order."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(0, programs, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        inside = (row < programs)[:, None] & (column < columns)[None, :]
        total += tl.load(sums_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < columns)


def _block_rows(u: Tensor) -> int:
    """Rows of a block of which 128 threads load 16 bytes each: all programs of ``plan`` have registers at once."""
    return 8 // u.element_size()


def plan(
    like: Tensor, total: int, columns: int, *, block: int = BLOCK_COLUMNS, parts: int = 1, multiple: int = 1,
    least: int = LEAST_ROWS, programs: int = _PROGRAMS_PER_PROCESSOR,
) -> tuple[int, tuple[int, int]]:  # fmt: skip
    """Rows per program, a ``multiple``, and the grid of programs over rows and blocks of columns of each part.

    They are the ``least`` or more, or all, so that partial sums are few; ``programs`` are those of a processor.
    """
    blocks = triton.cdiv(columns, block)
    along = max(processors(like) * programs // max(parts * blocks, 1), 1)
    rows = triton.cdiv(max(triton.cdiv(total, along), min(total, least), 1), multiple) * multiple
    return rows, (triton.cdiv(total, rows), blocks)


def strided(*parts: Tensor) -> tuple[list[Tensor], dict[str, int]]:
    """Gradients of q, k and v ``[B, H, T, D]`` with neighbouring channels, and their strides of heads and tokens.

    The strides are constants of the kernels, because Triton knows the alignment of multiples of 16 alone.
    """
    given = [part if part.stride(3) == 1 else part.contiguous() for part in parts]
    axes = {"H": 1, "T": 2}
    strides = {
        f"{name}_{axis}": part.stride(i) for name, part in zip("QKV", given, strict=True) for axis, i in axes.items()
    }
    return given, strides


def gradients(dy: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the gradients of ``u [..., C]`` and of the bias ``[C]``, as ``dy`` is that of the output."""
    return u.new_empty(u.shape), u.new_empty(u.shape[-1:])


def differentiate(kernel: Any, dy: Tensor, u: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the ``gradients`` that a kernel writes by rows of ``columns`` numbers of the output."""
    du, dbias = gradients(dy, u)
    total = u.numel() // max(u.shape[-1], 1)
    rows, grid = plan(u, total, columns)
    sums = u.new_empty((grid[0], u.shape[-1]), dtype=torch.float32)
    run(
        kernel, grid, du, sums, dy.contiguous(), u.contiguous(), total, rows, columns,
        BLOCK_R=_block_rows(u), BLOCK_C=BLOCK_COLUMNS, num_warps=4,
    )  # fmt: skip
    fold(sums, dbias)
    return du, dbias


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, u: Tensor, bias: Tensor | None, function: Callable[[Tensor], Tensor], backward: Callable[..., Any]
    ) -> Tensor:
        ctx.save_for_backward(u)
        ctx.summed, ctx.differentiate = bias is not None, backward
        return function(u)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        du, dbias = ctx.differentiate(*upstream, *ctx.saved_tensors)
        return du, dbias if ctx.summed else None, None, None


def summed(
    u: Tensor, bias: Tensor | None, function: Callable[[Tensor], Tensor], backward: Callable[..., Any]
) -> Tensor:
    """``function(u)``, whose gradients of ``u`` and of ``bias`` are ``backward(dy, u)``, as by ``differentiate``."""
    out: Tensor = _Summed.apply(u, bias, function, backward)  # type: ignore[no-untyped-call]
    return out


def fold(sums: Tensor, dbias: Tensor) -> None:
    """Write to ``dbias [C]`` the sum of the rows of ``sums [programs, C]``, fp32."""
    programs, columns = sums.shape
    constants = {"BLOCK_R": 64, "BLOCK_C": 16, "num_warps": 4}
    run(bias_gradient_fold_kernel, (triton.cdiv(columns, 16),), dbias, sums, programs, columns, **constants)


@torch.library.custom_op("fastdiff::bias_gradient_join", mutates_args=())
def _join(dq: Tensor, dk: Tensor, dv: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """Join ``3 x [B, H, T, D]`` to ``[B, T, 3, H, D]``, or ``[B, T, H, 3, D]`` if not ``packed``, and sum its rows."""
    du, dbias = _joined(dq, dk, dv, packed)
    parts, strides = strided(dq, dk, dv)
    batch, heads, length, width = dq.shape
    total, columns = batch * length, heads * width
    rows, grid = plan(dq, total, columns)
    sums = dq.new_empty((grid[0], 3 * columns), dtype=torch.float32)
    head, part = (width, columns) if packed else (3 * width, width)
    run(
        bias_gradient_join_kernel, grid, du, sums, *parts, total, rows, length, *(p.stride(0) for p in parts),
        H=heads, D=width, HEAD=head, PART=part, **strides, BLOCK_R=_BLOCK_ROWS, BLOCK_C=BLOCK_COLUMNS, num_warps=8,
    )  # fmt: skip
    fold(sums, dbias)
    return du, dbias


@_join.register_fake
def _joined(dq: Tensor, dk: Tensor, dv: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = dq.shape
    order = (3, heads) if packed else (heads, 3)
    return dq.new_empty((batch, length, *order, width)), dq.new_empty(3 * heads * width)


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        ctx.packed = _is_packed(u)
        return _views(u)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        du, dbias = _join(*upstream, ctx.packed)
        return du if ctx.packed else du.transpose(2, 3), dbias


def unpacked(u: Tensor, bias: Tensor, *, backend: Backend | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries, keys and values; joins their gradients to one, and sums it to the gradient of ``bias``.

    Args:
        u: ``[B, T, 3, H, D]`` fp32, bf16 or fp16, contiguous, or a view of ``[B, T, H, 3, D]``; the reference takes any
            floating dtype.
        bias: ``[3 * H * D]`` in the memory order of ``u``, contained in ``u`` already; of its dtype and device.
        backend: implementation; None: that of ``adaln``.

    Returns:
        3 x ``[B, H, T, D]``.

    Raises:
        ValueError: a wrong shape, dtype or device, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = choose("adaln", u, backend)
    if u.dim() != 5 or u.shape[2] != 3:
        raise ValueError(f"u has shape {tuple(u.shape)}, expected [B, T, 3, H, D]")
    validate(chosen == "triton", u, bias, u.shape[2:].numel())
    if chosen == "triton":
        query, key, value = _Unpacked.apply(u, bias)  # type: ignore[no-untyped-call]
    else:
        query, key, value = plain(unpacked_reference, chosen)(u, bias)
    return query, key, value


def validate(kernel: bool, u: Tensor, bias: Tensor | None, width: int) -> None:
    """Raise ValueError if ``bias`` is not ``[width]`` of the dtype and device of ``u``, or no kernel takes ``u``."""
    if kernel and u.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"u is {u.dtype}, expected float32, bfloat16 or float16; use backend 'reference'")
    if bias is None:
        return
    if tuple(bias.shape) != (width,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({width},) as u is {tuple(u.shape)}")
    if bias.dtype != u.dtype or bias.device != u.device:
        raise ValueError(
            f"bias is {bias.dtype} on {bias.device}, expected that of u, {u.dtype} on {u.device}; use bias.to(u)"
        )
