"""Rotary position embedding of queries and keys, with their norm, on a packed projection; its bias's gradient, too.

A head of a query or key, of d channels, is divided by its root mean square and multiplied by a weight (RMSNorm: Zhang &
Sennrich 2019, arXiv:1910.07467; of queries and keys: Henry et al. 2020, arXiv:2010.04245); then its neighbouring pairs
of channels are rotated by the angles of its token (Su et al. 2021, arXiv:2104.09864, eq. 34)::

    n = x / sqrt(mean(x^2) + eps),   m = n * weight,   (y0, y1) = (m0 cos - m1 sin, m1 cos + m0 sin)

Values stay as they are. Either part may be absent. Gradient, with m' the gradient of y turned back, and sums over all
rows and heads for the weights, over all rows for the bias that the projection contains (``bias_gradient.py``)::

    m'0 = y'0 cos + y'1 sin,   m'1 = y'1 cos - y'0 sin,   dweight = sum(m' n),   g = m' weight
    dx = (g - n mean(g n)) / sqrt(mean(x^2) + eps)

The norm, its weight and the rotation are computed in fp32, and rounded once. Nothing is stored for the backward pass
but ``u``, and for a rotation alone nothing: it reduces x^2 again, in one exchange between lanes with g n.

Bytes moved per channel of a token (D = H d of them) in 16 bits, beside a table of 4 d per token, which the caches hold;
R is the number of tokens that one program works through::

                     forward      backward         of torch in eager mode
    rotated              12       16 + 24 / R
    rotated_parts         8       16 + 24 / R
    a rotation alone  likewise    12 + 24 / R

``rotated`` also copies the values; ``rotated_parts`` returns a view of them, for attention that takes three tensors,
and joins the three gradients to that of the projection: without this op, that alone is 12 (``bias_gradient.unpacked``).

It runs wherever ``adaln`` runs by its kernels, by the same choice (``dispatch.choose``): both belong to the DiT.

Limits: fp32, bf16 and fp16; heads of an even number of channels, at most 512.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.bias_gradient import LEAST_ROWS, fold, plan, strided, validate, with_gradient
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import jit, registers, run, tl, triton
from fastdiff_kernels.names import Backend

MAX_HEAD = 512
"""Most channels of a head that a program holds."""
_TILE, _WARPS = 1024, 2
"""Numbers of the larger piece of a tile, and warps of a program: 16 for each thread, a tail of 8 then a pair."""
_FORWARD, _BACKWARD = 12, {2: 6, 4: 4}
"""Programs that a processor holds at once, by the registers that their kernels want; even, since each has two warps. A
backward pass in fp32, by bytes of a number, has fewer.
"""


class Rotary(NamedTuple):
    """Arguments of ``rotated`` beside the packed projection, whose heads have d channels."""

    cos: Tensor | None = None
    """Cosines ``[T, d / 2]`` fp32, one for each pair of neighbouring channels; 1 for a token that is not rotated. Of
    samples whose tokens differ, ``[B, T, d / 2]``."""
    sin: Tensor | None = None
    """Sines, likewise; 0 for a token that is not rotated. Neither: no rotation."""
    q_weight: Tensor | None = None
    """Weight of the norm of queries ``[d]``, of the dtype of the projection."""
    k_weight: Tensor | None = None
    """Of keys, likewise. Neither: no norm."""
    eps: float = 1e-6
    """Added to the mean square."""


def _turned(x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    """Norm and rotation of ``x [B, T, H, d]``; products with cosines and sines are fp32 or wider."""
    if weight is not None:
        x = F.rms_norm(x, x.shape[-1:], weight, eps)
    if cos is None or sin is None:
        return x
    first, second = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[..., None, :], sin[..., None, :]  # [T, 1, d / 2] or [B, T, 1, d / 2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).to(x.dtype)


def rotated_parts_reference(
    u: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 1e-6, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``rotated_parts`` in plain torch, differentiable, in any floating dtype."""
    u = with_gradient(u, None if bias is None else bias.view(u.shape[2:]))
    query, key, value = u.unbind(2)
    query, key = _turned(query, q_weight, cos, sin, eps), _turned(key, k_weight, cos, sin, eps)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def rotated_reference(
    u: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 1e-6, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``rotated`` in plain torch, differentiable, in any floating dtype."""
    parts = rotated_parts_reference(u, cos, sin, q_weight, k_weight, eps, bias)
    return torch.stack([part.transpose(1, 2) for part in parts], 2)


# A head is held as two pieces, because blocks have power-of-two sizes: 72 channels as 64 (_a) and 8 (_b). In one piece
# they would cost as many instructions as 128. Without a tail, _b is _a, and is neither added nor stored.


@jit
def _load(row_ptr, column, inside, D: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both pieces of rows ``[R, 1]`` in fp32; ``column`` 0 to HEAD."""
    a = tl.load(row_ptr + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)[None, :]
        return a, tl.load(row_ptr + rest, mask=inside & (rest < D), other=0.0).to(tl.float32)
    else:
        return a, a


@jit
def _store(row_ptr, column, inside, a, b, D: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(row_ptr + column[None, :], a.to(row_ptr.dtype.element_ty), mask=inside)
    if TAIL:
        rest = HEAD + tl.arange(0, TAIL)[None, :]
        tl.store(row_ptr + rest, b.to(row_ptr.dtype.element_ty), mask=inside & (rest < D))


@jit
def _row_sum(a, b, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.sum(a, 1)
    if TAIL:
        total += tl.sum(b, 1)
    return total[:, None]


@jit
def _turn(x, cos, sin):  # type: ignore[no-untyped-def]
    """Rotate neighbouring pairs of channels; by ``-sin``, back."""
    first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    turned = tl.join(first * cos - second * sin, second * cos + first * sin)
    return tl.reshape(turned, (x.shape[0], x.shape[1]))


@jit
def _table(table_ptr, token, inside, D: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both pieces of the cosines or sines of rows; None without them."""
    if table_ptr is not None:
        row_ptr = table_ptr + token[:, None] * (D // 2)
        return _load(row_ptr, tl.arange(0, HEAD // 2), inside, D // 2, HEAD // 2, TAIL // 2)
    else:
        return None, None


@jit
def _weight(weight_ptr, column, D: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    if weight_ptr is not None:
        return _load(weight_ptr, column, True, D, HEAD, TAIL)
    else:
        return None, None


@jit
def _normed_and_turned(  # type: ignore[no-untyped-def]
    a, b, weight_a, weight_b, cos_a, cos_b, sin_a, sin_b, eps, D: tl.constexpr, TAIL: tl.constexpr
):
    """Queries or keys of a tile of rows."""
    if weight_a is not None:
        rstd = tl.rsqrt(_row_sum(a * a, b * b, TAIL) / D + eps)
        a, b = a * rstd * weight_a, b * rstd * weight_b
    if cos_a is not None:
        a, b = _turn(a, cos_a, sin_a), _turn(b, cos_b, sin_b)
    return a, b


@jit
def rotary_fwd_kernel(  # type: ignore[no-untyped-def]
    out_ptr, u_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, total, rows, period, eps,
    H: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """``rows`` tokens of a block of heads, of which a tile has ``BLOCK_R`` rows; of values, a copy if PARTS is 3.

    The tables have ``period`` rows: those of a sample, or of all tokens.
    """
    start = tl.program_id(0).to(tl.int64) * rows
    stop = tl.minimum(start + rows, total)
    lane, column = tl.arange(0, BLOCK_R), tl.arange(0, HEAD)
    at = (tl.program_id(1) * BLOCK_H + lane % BLOCK_H) * D
    q_a, q_b = _weight(q_weight_ptr, column, D, HEAD, TAIL)
    k_a, k_b = _weight(k_weight_ptr, column, D, HEAD, TAIL)
    for first in range(start, stop, BLOCK_R // BLOCK_H):
        token = first + lane // BLOCK_H
        inside = (token < stop)[:, None]
        from_ptr = u_ptr + (token * (3 * H * D) + at)[:, None]
        to_ptr = out_ptr + (token * (PARTS * H * D) + at)[:, None]
        cos_a, cos_b = _table(cos_ptr, token % period, inside, D, HEAD, TAIL)
        sin_a, sin_b = _table(sin_ptr, token % period, inside, D, HEAD, TAIL)
        a, b = _load(from_ptr, column, inside, D, HEAD, TAIL)
        a, b = _normed_and_turned(a, b, q_a, q_b, cos_a, cos_b, sin_a, sin_b, eps, D, TAIL)
        _store(to_ptr, column, inside, a, b, D, HEAD, TAIL)
        a, b = _load(from_ptr + H * D, column, inside, D, HEAD, TAIL)
        a, b = _normed_and_turned(a, b, k_a, k_b, cos_a, cos_b, sin_a, sin_b, eps, D, TAIL)
        _store(to_ptr + H * D, column, inside, a, b, D, HEAD, TAIL)
        if PARTS == 3:
            a, b = _load(from_ptr + 2 * H * D, column, inside, D, HEAD, TAIL)
            _store(to_ptr + 2 * H * D, column, inside, a, b, D, HEAD, TAIL)


@jit
def _part_backward(  # type: ignore[no-untyped-def]
    du_ptr, sums_ptr, weight_sums_ptr, up_ptr, u_ptr, cos_ptr, sin_ptr, weight_ptr, total, rows, length, period,
    up_stride, eps,
    STRIDE_H: tl.constexpr, STRIDE_T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr,
    TAIL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Gradient of queries, keys or values for ``rows`` tokens of a block of heads, and its sums.

    Values have neither angles nor a weight: their gradient is copied.
    """
    start = tl.program_id(0).to(tl.int64) * rows
    stop = tl.minimum(start + rows, total)
    lane, column = tl.arange(0, BLOCK_R), tl.arange(0, HEAD)
    head = tl.program_id(1) * BLOCK_H + lane % BLOCK_H
    weight_a, weight_b = _weight(weight_ptr, column, D, HEAD, TAIL)
    sums_a = tl.zeros((BLOCK_R, HEAD), tl.float32)
    sums_b = tl.zeros((BLOCK_R, TAIL if TAIL else 1), tl.float32)
    weight_sums_a, weight_sums_b = sums_a, sums_b
    for first in range(start, stop, BLOCK_R // BLOCK_H):
        token = first + lane // BLOCK_H
        inside = (token < stop)[:, None]
        at = (token * (3 * H * D) + head * D)[:, None]
        up_at = token // length * up_stride + token % length * STRIDE_T + head * STRIDE_H
        a, b = _load(up_ptr + up_at[:, None], column, inside, D, HEAD, TAIL)
        if cos_ptr is not None:
            cos_a, cos_b = _table(cos_ptr, token % period, inside, D, HEAD, TAIL)
            sin_a, sin_b = _table(sin_ptr, token % period, inside, D, HEAD, TAIL)
            a, b = _turn(a, cos_a, -sin_a), _turn(b, cos_b, -sin_b)
        if weight_ptr is not None:
            x_a, x_b = _load(u_ptr + at, column, inside, D, HEAD, TAIL)
            rstd = tl.rsqrt(_row_sum(x_a * x_a, x_b * x_b, TAIL) / D + eps)
            x_a, x_b = x_a * rstd, x_b * rstd
            weight_sums_a += a * x_a
            if TAIL:
                weight_sums_b += b * x_b
            a, b = a * weight_a, b * weight_b
            slope = _row_sum(a * x_a, b * x_b, TAIL) / D
            a, b = rstd * (a - x_a * slope), rstd * (b - x_b * slope)
        _store(du_ptr + at, column, inside, a, b, D, HEAD, TAIL)
        sums_a += a
        if TAIL:
            sums_b += b
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    out_ptr = sums_ptr + tl.program_id(0).to(tl.int64) * (3 * H * D) + (heads * D)[:, None]
    sums_a = tl.sum(tl.reshape(sums_a, (BLOCK_R // BLOCK_H, BLOCK_H, HEAD)), 0)
    sums_b = tl.sum(tl.reshape(sums_b, (BLOCK_R // BLOCK_H, BLOCK_H, TAIL if TAIL else 1)), 0)
    _store(out_ptr, column, True, sums_a, sums_b, D, HEAD, TAIL)
    if weight_ptr is not None:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        weight_sums_a, weight_sums_b = tl.sum(weight_sums_a, 0)[None, :], tl.sum(weight_sums_b, 0)[None, :]
        _store(weight_sums_ptr + program * (2 * D), column, True, weight_sums_a, weight_sums_b, D, HEAD, TAIL)


@jit
def rotary_bwd_kernel(  # type: ignore[no-untyped-def]
    du_ptr, sums_ptr, weight_sums_ptr, dq_ptr, dk_ptr, dv_ptr, u_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    total, rows, length, period, q_stride, k_stride, v_stride, eps,
    H: tl.constexpr, D: tl.constexpr, Q_H: tl.constexpr, Q_T: tl.constexpr, K_H: tl.constexpr, K_T: tl.constexpr,
    V_H: tl.constexpr, V_T: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program does queries, keys or values of ``rows`` tokens of a block of heads."""
    part = tl.program_id(2)
    if part == 0:
        _part_backward(
            du_ptr, sums_ptr, weight_sums_ptr, dq_ptr, u_ptr, cos_ptr, sin_ptr, q_weight_ptr, total, rows, length,
            period, q_stride, eps, Q_H, Q_T, H, D, HEAD, TAIL, BLOCK_R, BLOCK_H,
        )  # fmt: skip
    elif part == 1:
        _part_backward(
            du_ptr + H * D, sums_ptr + H * D, _after(weight_sums_ptr, D), dk_ptr, _after(u_ptr, H * D), cos_ptr,
            sin_ptr, k_weight_ptr, total, rows, length, period, k_stride, eps, K_H, K_T, H, D, HEAD, TAIL, BLOCK_R,
            BLOCK_H,
        )  # fmt: skip
    else:
        _part_backward(
            du_ptr + 2 * H * D, sums_ptr + 2 * H * D, None, dv_ptr, None, None, None, None, total, rows, length,
            period, v_stride, eps, V_H, V_T, H, D, HEAD, TAIL, BLOCK_R, BLOCK_H,
        )  # fmt: skip


@jit
def _after(pointer, count: tl.constexpr):  # type: ignore[no-untyped-def]
    """``count`` numbers further; None without a pointer."""
    if pointer is not None:
        return pointer + count
    else:
        return None


def _plan(like: Tensor, sizes: torch.Size, passes: int) -> tuple[int, tuple[int, ...], dict[str, int]]:
    """Tokens of a program, the grid, and constants and options; ``sizes`` of ``[B, T, H, d]``.

    A tile has neighbouring heads, as many as leave none masked. A backward pass has three ``passes``: parts.
    """
    batch, length, heads, width = sizes
    head = 1 << (width.bit_length() - 1)
    tail = 0 if head == width else max(int(triton.next_power_of_2(width - head)), 2)
    tile_rows = max(_TILE // head // (2 if tail >= 16 else 1), 1)  # as few as leave each thread a pair of the tail
    tile_heads = min(heads & -heads, tile_rows)
    constants = {"H": heads, "D": width, "HEAD": head, "TAIL": tail, "BLOCK_R": tile_rows, "BLOCK_H": tile_heads}
    tokens = tile_rows // tile_heads
    programs = _FORWARD if passes == 1 else _BACKWARD[like.element_size()]
    rows, grid = plan(
        like, batch * length, heads * width, block=tile_heads * width, parts=passes, multiple=tokens,
        least=tokens if passes == 1 else LEAST_ROWS, programs=programs,
    )  # fmt: skip
    return rows, (*grid, passes), constants | {"num_warps": _WARPS, "maxnreg": registers(programs, _WARPS)}


def _optional(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _period(table: Tensor | None, length: int) -> int:
    """Rows of the tables of angles; any number without one."""
    return length if table is None else table.numel() // table.shape[-1]


@torch.library.custom_op("fastdiff::rotary_forward", mutates_args=())
def _rotary_triton(
    u: Tensor, cos: Tensor | None, sin: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    parts: int,
) -> Tensor:  # fmt: skip
    """Queries and keys, and values if there are three ``parts``: ``[B, T, parts, H, d]``."""
    out: Tensor = _empty(u, cos, sin, q_weight, k_weight, eps, parts)
    batch, length, _, heads, width = u.shape
    rows, grid, constants = _plan(u, torch.Size((batch, length, heads, width)), 1)
    run(
        rotary_fwd_kernel, grid, out, *_optional(u, cos, sin, q_weight, k_weight), batch * length, rows,
        _period(cos, length), eps, PARTS=parts, **constants,
    )  # fmt: skip
    return out


@_rotary_triton.register_fake
def _empty(
    u: Tensor, cos: Tensor | None, sin: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
    parts: int,
) -> Tensor:  # fmt: skip
    batch, length, _, heads, width = u.shape
    return u.new_empty(batch, length, parts, heads, width)


@torch.library.custom_op("fastdiff::rotary_backward", mutates_args=())
def _rotary_backward_triton(
    dq: Tensor, dk: Tensor, dv: Tensor, u: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
) -> list[Tensor]:  # fmt: skip
    """``[du, dbias]`` from gradients ``[B, H, T, d]``, with weights ``[du, dbias, dweights [2 * d]]``.

    ``u`` is the projection, which only a norm needs.
    """
    outputs: list[Tensor] = _empty_gradients(dq, dk, dv, u, cos, sin, q_weight, k_weight, eps)
    du, dbias, *dweights = outputs
    batch, heads, length, width = dq.shape
    rows, grid, constants = _plan(dq, torch.Size((batch, length, heads, width)), 3)
    sums = dq.new_empty((grid[0], 3 * heads * width), dtype=torch.float32)
    weight_sums = None if q_weight is None else dq.new_empty((grid[0] * grid[1], 2 * width), dtype=torch.float32)
    parts, strides = strided(dq, dk, dv)
    run(
        rotary_bwd_kernel, grid, du, sums, weight_sums, *parts, *_optional(u, cos, sin, q_weight, k_weight),
        batch * length, rows, length, _period(cos, length), *(part.stride(0) for part in parts), eps, **strides,
        **constants,
    )  # fmt: skip
    fold(sums, dbias)
    if weight_sums is not None:
        fold(weight_sums, dweights[0])
    return outputs


@_rotary_backward_triton.register_fake
def _empty_gradients(
    dq: Tensor, dk: Tensor, dv: Tensor, u: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
) -> list[Tensor]:  # fmt: skip
    batch, heads, length, width = dq.shape
    weights = [] if q_weight is None else [dq.new_empty(2 * width)]
    return [dq.new_empty(batch, length, 3, heads, width), dq.new_empty(3 * heads * width), *weights]


class _Rotated(torch.autograd.Function):
    """The packed projection, or three views: queries and keys of one tensor, values of ``u``."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, q_weight: Tensor | None,
        k_weight: Tensor | None, eps: float, parts: int,
    ) -> Any:  # fmt: skip
        out = _rotary_triton(u, cos, sin, q_weight, k_weight, eps, parts)
        ctx.save_for_backward(None if q_weight is None else u, cos, sin, q_weight, k_weight)
        ctx.eps, ctx.summed = eps, bias is not None
        return out if parts == 3 else (*_views(out), u[:, :, 2].transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        parts = _views(upstream[0]) if len(upstream) == 1 else upstream
        du, dbias, *dweights = _rotary_backward_triton(*parts, *ctx.saved_tensors, ctx.eps)
        weights = dweights[0].view(2, -1).unbind(0) if dweights else (None, None)
        return du, dbias if ctx.summed else None, None, None, *weights, None, None


def _views(u: Tensor) -> tuple[Tensor, ...]:
    return u.permute(2, 0, 3, 1, 4).unbind(0)  # [B, T, N, H, d] -> N x [B, H, T, d]


def rotated(
    u: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 1e-6, *, bias: Tensor | None = None, backend: Backend | None = None,
) -> Tensor:  # fmt: skip
    """Queries and keys normed per head, then rotated; values as they are.

    Args:
        u: packed projection ``[B, T, 3, H, d]``, fp32, bf16 or fp16, d even; the reference takes any floating dtype.
        cos: see ``Rotary``, and so for sin, the weights and eps.
        sin: see ``cos``.
        q_weight: see ``cos``.
        k_weight: see ``cos``.
        eps: see ``cos``.
        bias: ``[3 * H * d]``, contained in ``u`` already; of its dtype and device. None: no gradient of a bias is asked
            for.
        backend: implementation; None: that of ``adaln``.

    Returns:
        ``[B, T, 3, H, d]`` in the dtype of ``u``, contiguous by the kernel.

    Raises:
        ValueError: a wrong shape, dtype or device, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = choose("adaln", u, backend)
    _validate(chosen == "triton", u, Rotary(cos, sin, q_weight, k_weight, eps), bias)
    if chosen == "triton":
        out: Tensor = _Rotated.apply(u, bias, cos, sin, q_weight, k_weight, eps, 3)  # type: ignore[no-untyped-call]
    else:
        out = plain(rotated_reference, chosen)(u, cos, sin, q_weight, k_weight, eps, bias)
    return out


def rotated_parts(
    u: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 1e-6, *, bias: Tensor | None = None, backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``rotated`` as queries, keys and values, ``[B, H, T, d]`` each; values are a view of ``u``.

    Arguments and errors as for ``rotated``. Their three gradients are joined to that of ``u`` by the kernel that turns
    them back.
    """
    chosen = choose("adaln", u, backend)
    _validate(chosen == "triton", u, Rotary(cos, sin, q_weight, k_weight, eps), bias)
    if chosen == "triton":
        query, key, value = _Rotated.apply(u, bias, cos, sin, q_weight, k_weight, eps, 2)  # type: ignore[no-untyped-call]
    else:
        query, key, value = plain(rotated_parts_reference, chosen)(u, cos, sin, q_weight, k_weight, eps, bias)
    return query, key, value


def _validate(kernel: bool, u: Tensor, rotary: Rotary, bias: Tensor | None) -> None:
    if u.dim() != 5 or u.shape[2] != 3 or u.shape[4] % 2:
        raise ValueError(f"u has shape {tuple(u.shape)}, expected [B, T, 3, H, d] with d even")
    if kernel and u.shape[4] > MAX_HEAD:
        raise ValueError(f"u has heads of {u.shape[4]} channels, expected at most {MAX_HEAD}; use backend 'reference'")
    validate(kernel, u, bias, u.shape[2:].numel())
    cos, sin, q_weight, k_weight, _ = rotary
    for names, pair in (("cos and sin", (cos, sin)), ("q_weight and k_weight", (q_weight, k_weight))):
        if (pair[0] is None) != (pair[1] is None):
            raise ValueError(f"of {names} one is None, expected both or neither")
    if cos is None and q_weight is None:
        raise ValueError("neither angles nor weights are given, expected either or both; see fastdiff_kernels.rotary")
    length, width = u.shape[1], u.shape[4]
    tables = {"cos": cos, "sin": sin}
    of_samples = u.shape[:1] if cos is not None and cos.dim() == 3 else ()
    for name, tensor in (tables | {"q_weight": q_weight, "k_weight": k_weight}).items():
        if tensor is None:
            continue
        shape = (*of_samples, length, width // 2) if name in tables else (width,)
        dtype = torch.promote_types(torch.float32, u.dtype) if name in tables else u.dtype
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape} as u is {tuple(u.shape)}")
        if tensor.dtype != dtype or tensor.device != u.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, expected {dtype} on {u.device}")
