"""Self-attention of up to 256 tokens on a packed projection, with a backward pass that adds in a fixed order.

For each sample and head, with queries, keys and values ``[T, D]`` and ``c = 1 / sqrt(D)`` (Vaswani et al. 2017,
arXiv:1706.03762, eq. 1)::

    s = c q k^T,   lse = log(sum(exp(s))),   p = exp(s - lse),   out = p v

Gradient (Dao et al. 2022, arXiv:2205.14135, appendix B.4), with sums over the channels of a token::

    delta = sum(dout * out),   ds = p * (dout v^T - delta)
    dq = c ds k,   dk = c ds^T q,   dv = p^T dout

The gradients are written packed, as ``[B, T, 3, H, D]``. Those of the bias of the projection, sums over tokens, need
little: rows of p add up to 1, so the sum of dv is that of dout, and rows of ds to 0, so the sum of dk is 0 (a number
added to all keys changes no probability); dq is added up. A program writes its part for every sample.

One program does one head of one sample. Forward, all its keys and values stay in shared memory, where they fit, and
blocks of queries pass. Backward, a block of keys and values stays, with dk and dv in registers, and all queries pass,
so each score is computed once, in five matrix products. Of more than one block of keys the later add their part of dq
to what the earlier wrote: no two programs add to the same number. 256 tokens in 16 bits are two blocks on sm_90.

Channels are held as 64 and 16, because blocks have power-of-two sizes: 72 channels cost as much as 80, not as 128.

Least bytes per element of 16 bits: forward 8 (qkv, out) and 4 / D for lse, backward 16 (qkv, out, dout, dqkv) and
12 / D for lse and delta. On sm_90 the forward pass moves that, the backward pass 26 with 256 tokens, of which the later
readings of queries, dout and dq should come from the L2 cache. Saved for the backward pass, beside qkv and out: lse,
``[B, H, T]`` in fp32.

Limits: head dims 64, 72 and 80; bf16, fp16 and fp32, the last without tensor cores; Triton on sm_80 or newer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdiff_kernels.bias_gradient import fold
from fastdiff_kernels.launch import INTERPRETED, architecture, constant, jit, run, tl, triton

HEAD_DIMS = (64, 72, 80)
LONGEST = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Blocks(NamedTuple):
    """Tokens that a program holds and those that pass, as large as `bench aot` compiles without spills."""

    queries: int
    """Queries of a step of the forward pass."""
    keys: int
    """Keys that it holds; with fewer than there are they pass too, and scores are rescaled."""
    held: int
    """Keys that the backward pass holds."""
    passing: int
    """Queries of its step."""
    rows: int = 16
    """Keys of the backward pass per warp, up to eight warps."""
    stages: int = 2
    """Blocks of queries that the backward pass has in shared memory at once."""


BLOCKS = {
    100: Blocks(queries=64, keys=64, held=128, passing=32),
    90: Blocks(queries=64, keys=256, held=128, passing=64),
    80: Blocks(queries=64, keys=32, held=128, passing=16, rows=8, stages=1),
}
"""By compute capability in 16 bits, newest first; a device takes the first that is not newer."""
SMALL = Blocks(queries=16, keys=16, held=16, passing=16, stages=1)
"""In fp32, whose products are not those of tensor cores, and hold their operands in registers."""
_NARROWEST = 64
"""Rows of a product of a group of four warps on sm_90."""

_LOG2_E = constant(1.4426950408889634)
_LN_2 = constant(0.6931471805599453)
_INTERPRETED = constant(INTERPRETED)


def short_attention_reference(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    """``short_attention`` in plain torch, differentiable, in any floating dtype and of any length and head dim."""
    if bias is not None:
        qkv = qkv + (bias - bias.detach()).view(qkv.shape[2:])
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, T, 3, H, D] -> 3 x [B, H, T, D]
    scores = query @ key.transpose(-2, -1) * qkv.shape[-1] ** -0.5  # [B, H, T, T]
    mixed: Tensor = scores.softmax(-1) @ value  # [B, H, T, D]
    return mixed.transpose(1, 2).flatten(2)  # -> [B, T, H * D]


# Rows are held as two parts, of BLOCK_HEAD (_a) and BLOCK_TAIL (_b) channels; the second is unused if D is BLOCK_HEAD.


@jit
def _real(rows, channels, T: tl.constexpr, D: tl.constexpr, BLOCK_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of ``rows`` and ``channels`` exist; no condition on the rows where blocks divide the tokens."""
    real = (channels < D)[None, :]
    if T % BLOCK_ROWS != 0:
        real = real & (rows < T)[:, None]
    return real


@jit
def _load(  # type: ignore[no-untyped-def]
    base_ptr, rows, T: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Both parts of ``rows``, which are ``STEP`` elements apart; 0 past the last token and channel."""
    head, tail = tl.arange(0, BLOCK_HEAD), BLOCK_HEAD + tl.arange(0, BLOCK_TAIL)
    at = rows[:, None] * STEP
    a = tl.load(base_ptr + at + head[None, :], mask=_real(rows, head, T, D, BLOCK_ROWS), other=0.0)
    b = a
    if D > BLOCK_HEAD:
        b = tl.load(base_ptr + at + tail[None, :], mask=_real(rows, tail, T, D, BLOCK_ROWS), other=0.0)
    return a, b


@jit
def _store(  # type: ignore[no-untyped-def]
    base_ptr, rows, a, b, T: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    head, tail = tl.arange(0, BLOCK_HEAD), BLOCK_HEAD + tl.arange(0, BLOCK_TAIL)
    at = rows[:, None] * STEP
    tl.store(base_ptr + at + head[None, :], a.to(base_ptr.dtype.element_ty), mask=_real(rows, head, T, D, BLOCK_ROWS))
    if D > BLOCK_HEAD:
        tl.store(
            base_ptr + at + tail[None, :], b.to(base_ptr.dtype.element_ty), mask=_real(rows, tail, T, D, BLOCK_ROWS)
        )


@jit
def _zeros(BLOCK_ROWS: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.zeros((BLOCK_ROWS, BLOCK_HEAD), tl.float32), tl.zeros((BLOCK_ROWS, BLOCK_TAIL), tl.float32)


@jit
def _product(x, y, total):  # type: ignore[no-untyped-def]
    """``total + x y``, in fp32."""
    if _INTERPRETED:  # Triton's interpreter would multiply the bits of bf16 numbers
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision="ieee")


@jit
def _scores(x_a, x_b, y_a, y_b, scores, D: tl.constexpr, BLOCK_HEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """``scores + x y^T`` of rows ``[M, D]`` and ``[N, D]``."""
    scores = _product(x_a, tl.trans(y_a), scores)
    if D > BLOCK_HEAD:
        scores = _product(x_b, tl.trans(y_b), scores)
    return scores


@jit
def _mix(weights, y_a, y_b, total_a, total_b, D: tl.constexpr, BLOCK_HEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """``total + weights y`` of ``[M, N]`` weights and rows ``[N, D]``."""
    total_a = _product(weights.to(y_a.dtype), y_a, total_a)
    if D > BLOCK_HEAD:
        total_b = _product(weights.to(y_b.dtype), y_b, total_b)
    return total_a, total_b


@jit
def _short_attention_fwd_kernel(  # type: ignore[no-untyped-def]
    out_ptr, lse_ptr, qkv_ptr, scale,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program does one head of one sample; blocks of queries pass its keys and values, which stay if they fit."""
    program = tl.program_id(0).to(tl.int64)
    sample, head = program // H, program % H
    q_ptr, o_ptr = qkv_ptr + (sample * T * 3 * H + head) * D, out_ptr + (sample * T * H + head) * D
    keys = tl.arange(0, BLOCK_KEYS)
    if T <= BLOCK_KEYS:
        k_a, k_b = _load(q_ptr + H * D, keys, T, D, 3 * H * D, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)
        v_a, v_b = _load(q_ptr + 2 * H * D, keys, T, D, 3 * H * D, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)
    for first in tl.range(0, T, BLOCK_QUERIES, num_stages=STAGES if T <= BLOCK_KEYS else 1):
        rows = first + tl.arange(0, BLOCK_QUERIES)
        q_a, q_b = _load(q_ptr, rows, T, D, 3 * H * D, BLOCK_QUERIES, BLOCK_HEAD, BLOCK_TAIL)
        top = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_QUERIES,), tl.float32)
        o_a, o_b = _zeros(BLOCK_QUERIES, BLOCK_HEAD, BLOCK_TAIL)
        for start in tl.range(0, T, BLOCK_KEYS, num_stages=STAGES):
            keys = start + tl.arange(0, BLOCK_KEYS)
            if T > BLOCK_KEYS:
                k_a, k_b = _load(q_ptr + H * D, keys, T, D, 3 * H * D, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)
                v_a, v_b = _load(q_ptr + 2 * H * D, keys, T, D, 3 * H * D, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)
            s = _scores(q_a, q_b, k_a, k_b, None, D, BLOCK_HEAD) * (scale * _LOG2_E)
            if T % BLOCK_KEYS != 0:
                s = tl.where((keys < T)[None, :], s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            p, shrink = tl.exp2(s - higher[:, None]), tl.exp2(top - higher)
            total, top = total * shrink + tl.sum(p, 1), higher
            o_a, o_b = _mix(p, v_a, v_b, o_a * shrink[:, None], o_b * shrink[:, None], D, BLOCK_HEAD)
        _store(
            o_ptr, rows, o_a / total[:, None], o_b / total[:, None], T, D, H * D, BLOCK_QUERIES, BLOCK_HEAD, BLOCK_TAIL
        )
        tl.store(lse_ptr + program * T + rows, (top + tl.log2(total)) * _LN_2, mask=rows < T)


@jit
def _prepare(  # type: ignore[no-untyped-def]
    delta_ptr, sums_ptr, do_ptr, o_ptr, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """``delta`` of one head, and the sum of ``dv`` over its tokens, which is that of ``dout``."""
    sums_a, sums_b = _zeros(BLOCK_ROWS, BLOCK_HEAD, BLOCK_TAIL)
    for first in tl.range(0, T, BLOCK_ROWS, num_stages=1):
        rows = first + tl.arange(0, BLOCK_ROWS)
        do_a, do_b = _load(do_ptr, rows, T, D, H * D, BLOCK_ROWS, BLOCK_HEAD, BLOCK_TAIL)
        o_a, o_b = _load(o_ptr, rows, T, D, H * D, BLOCK_ROWS, BLOCK_HEAD, BLOCK_TAIL)
        delta = tl.sum(o_a.to(tl.float32) * do_a.to(tl.float32), 1)
        if D > BLOCK_HEAD:
            delta += tl.sum(o_b.to(tl.float32) * do_b.to(tl.float32), 1)
        tl.store(delta_ptr + rows, delta, mask=rows < T)
        if SUMS:
            sums_a += do_a.to(tl.float32)
            if D > BLOCK_HEAD:
                sums_b += do_b.to(tl.float32)
    if SUMS:
        _store_sums(sums_ptr + 2 * H * D, sums_a, sums_b, D, BLOCK_HEAD, BLOCK_TAIL)


@jit
def _store_sums(sums_ptr, a, b, D: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums over the rows of both parts."""
    head, tail = tl.arange(0, BLOCK_HEAD), BLOCK_HEAD + tl.arange(0, BLOCK_TAIL)
    tl.store(sums_ptr + head, tl.sum(a, 0))
    if D > BLOCK_HEAD:
        tl.store(sums_ptr + tail, tl.sum(b, 0), mask=tail < D)


@jit
def _gradients_of_keys(  # type: ignore[no-untyped-def]
    dq_ptr, delta_ptr, do_ptr, lse_ptr, q_ptr, scale, first,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dk`` and ``dv`` of a block of keys, which all queries pass, and its part of ``dq``; scores are transposed."""
    keys = first + tl.arange(0, BLOCK_KEYS)
    k_a, k_b = _load(q_ptr + H * D, keys, T, D, 3 * H * D, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)
    v_a, v_b = _load(q_ptr + 2 * H * D, keys, T, D, 3 * H * D, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)
    dk_a, dk_b = _zeros(BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)
    dv_a, dv_b = _zeros(BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)
    for start in tl.range(0, T, BLOCK_QUERIES, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_QUERIES)
        q_a, q_b = _load(q_ptr, rows, T, D, 3 * H * D, BLOCK_QUERIES, BLOCK_HEAD, BLOCK_TAIL)
        do_a, do_b = _load(do_ptr, rows, T, D, H * D, BLOCK_QUERIES, BLOCK_HEAD, BLOCK_TAIL)
        lse = tl.load(lse_ptr + rows, mask=rows < T, other=0.0) / scale
        delta = tl.load(delta_ptr + rows, mask=rows < T, other=0.0)
        # A query that does not exist has dout = 0 and delta = 0, and adds nothing. lse and delta are where the sums
        # of the products begin, because there are no registers for them beside.
        less = tl.zeros((BLOCK_KEYS, BLOCK_QUERIES), tl.float32) - lse[None, :]
        p = tl.exp2(_scores(k_a, k_b, q_a, q_b, less, D, BLOCK_HEAD) * (scale * _LOG2_E))
        if T % BLOCK_KEYS != 0:  # exp(-lse) of a key that does not exist may be infinite
            p = tl.where((keys < T)[:, None], p, 0.0)
        less = tl.zeros((BLOCK_KEYS, BLOCK_QUERIES), tl.float32) - delta[None, :]
        ds = (p * _scores(v_a, v_b, do_a, do_b, less, D, BLOCK_HEAD)).to(k_a.dtype)
        dv_a, dv_b = _mix(p, do_a, do_b, dv_a, dv_b, D, BLOCK_HEAD)
        dk_a, dk_b = _mix(ds, q_a, q_b, dk_a, dk_b, D, BLOCK_HEAD)
        _add_to_queries(dq_ptr, rows, first, ds, k_a, k_b, scale, T, H, D, BLOCK_QUERIES, BLOCK_HEAD, BLOCK_TAIL)
    _store(dq_ptr + H * D, keys, dk_a * scale, dk_b * scale, T, D, 3 * H * D, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)
    _store(dq_ptr + 2 * H * D, keys, dv_a, dv_b, T, D, 3 * H * D, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)


@jit
def _add_to_queries(  # type: ignore[no-untyped-def]
    dq_ptr, rows, first, ds, k_a, k_b, scale, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Write the part of ``dq`` of the first block of keys; add that of a later one."""
    dq_a, dq_b = _zeros(BLOCK_QUERIES, BLOCK_HEAD, BLOCK_TAIL)
    dq_a, dq_b = _mix(tl.trans(ds), k_a, k_b, dq_a, dq_b, D, BLOCK_HEAD)
    dq_a, dq_b = dq_a * scale, dq_b * scale
    if first > 0:
        before_a, before_b = _load(dq_ptr, rows, T, D, 3 * H * D, BLOCK_QUERIES, BLOCK_HEAD, BLOCK_TAIL)
        dq_a += before_a.to(tl.float32)
        if D > BLOCK_HEAD:
            dq_b += before_b.to(tl.float32)
    _store(dq_ptr, rows, dq_a, dq_b, T, D, 3 * H * D, BLOCK_QUERIES, BLOCK_HEAD, BLOCK_TAIL)


@jit
def _short_attention_bwd_kernel(  # type: ignore[no-untyped-def]
    dqkv_ptr, sums_ptr, delta_ptr, dout_ptr, out_ptr, lse_ptr, qkv_ptr, scale,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, STAGES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One program does one head of one sample."""
    program = tl.program_id(0).to(tl.int64)
    sample, head = program // H, program % H
    packed, plain = (sample * T * 3 * H + head) * D, (sample * T * H + head) * D
    sums_ptr += (sample * 3 * H + head) * D
    delta_ptr += program * T
    _prepare(delta_ptr, sums_ptr, dout_ptr + plain, out_ptr + plain, T, H, D, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL, SUMS)
    for first in tl.range(0, T, BLOCK_KEYS, num_stages=1):
        tl.debug_barrier()  # delta and dq are read by other threads than those that wrote them
        _gradients_of_keys(
            dqkv_ptr + packed, delta_ptr, dout_ptr + plain, lse_ptr + program * T, qkv_ptr + packed, scale,
            first, T, H, D, BLOCK_QUERIES, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL, STAGES,
        )  # fmt: skip
    if SUMS:
        tl.debug_barrier()
        _sum_queries(sums_ptr, dqkv_ptr + packed, T, H, D, BLOCK_KEYS, BLOCK_HEAD, BLOCK_TAIL)


@jit
def _sum_queries(  # type: ignore[no-untyped-def]
    sums_ptr, dq_ptr, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """The sum of ``dq`` over the tokens of one head; that of ``dk`` is 0."""
    sums_a, sums_b = _zeros(BLOCK_ROWS, BLOCK_HEAD, BLOCK_TAIL)
    zeros_a, zeros_b = sums_a, sums_b
    for first in tl.range(0, T, BLOCK_ROWS, num_stages=1):
        rows = first + tl.arange(0, BLOCK_ROWS)
        dq_a, dq_b = _load(dq_ptr, rows, T, D, 3 * H * D, BLOCK_ROWS, BLOCK_HEAD, BLOCK_TAIL)
        sums_a += dq_a.to(tl.float32)
        if D > BLOCK_HEAD:
            sums_b += dq_b.to(tl.float32)
    _store_sums(sums_ptr, sums_a, sums_b, D, BLOCK_HEAD, BLOCK_TAIL)
    _store_sums(sums_ptr + H * D, zeros_a, zeros_b, D, BLOCK_HEAD, BLOCK_TAIL)


def _constants(qkv: Tensor, *, backward: bool) -> dict[str, Any]:
    """Blocks, warps and stages."""
    _, length, _, heads, head_dim = qkv.shape
    blocks = SMALL if qkv.dtype == torch.float32 else blocks_of(architecture(qkv))
    fits = max(triton.next_power_of_2(length), _NARROWEST)
    queries, keys = (blocks.passing, blocks.held) if backward else (blocks.queries, blocks.keys)
    keys = min(keys, fits)
    warps = min(keys // blocks.rows, 8) if backward else queries // 16
    return {
        "T": length, "H": heads, "D": head_dim, "BLOCK_QUERIES": queries, "BLOCK_KEYS": keys, "BLOCK_HEAD": 64,
        "BLOCK_TAIL": 16, "STAGES": blocks.stages if backward else 2, "num_warps": max(4, warps),
    }  # fmt: skip


def blocks_of(capability: int) -> Blocks:
    """Return the blocks in 16 bits for a compute capability, such as 90 for sm_90."""
    return next((blocks for newest, blocks in BLOCKS.items() if capability >= newest), BLOCKS[80])


@torch.library.custom_op("fastdiff::short_attention", mutates_args=())
def _short_attention_triton(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output ``[B, T, H * D]`` and fp32 log-sum-exp ``[B, H, T]``."""
    out, lse = _empty(qkv, bias)
    samples, _, _, heads, head_dim = qkv.shape
    run(
        _short_attention_fwd_kernel, (samples * heads,),
        out, lse, qkv.contiguous(), head_dim**-0.5, **_constants(qkv, backward=False),
    )  # fmt: skip
    return out, lse


@_short_attention_triton.register_fake
def _empty(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    samples, length, _, heads, head_dim = qkv.shape
    out = qkv.new_empty((samples, length, heads * head_dim))
    return out, qkv.new_empty((samples, heads, length), dtype=torch.float32)


@torch.library.custom_op("fastdiff::short_attention_backward", mutates_args=())
def _short_attention_backward_triton(
    dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, sums: bool
) -> tuple[Tensor, Tensor]:
    """Gradient of ``qkv``, contiguous, and of the bias ``[3 * H * D]``, or ``[0]`` if not ``sums``."""
    dqkv, dbias = _gradients(dout, out, lse, qkv, sums)
    samples, _, _, heads, head_dim = qkv.shape
    by_sample = lse.new_empty((samples, dbias.numel()))
    run(
        _short_attention_bwd_kernel, (samples * heads,),
        dqkv, by_sample, lse.new_empty(lse.shape), dout.contiguous(), out.contiguous(), lse.contiguous(),
        qkv.contiguous(), head_dim**-0.5, **_constants(qkv, backward=True), SUMS=sums,
    )  # fmt: skip
    if sums:
        fold(by_sample, dbias)
    return dqkv, dbias


@_short_attention_backward_triton.register_fake
def _gradients(dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, sums: bool) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), qkv.new_empty((qkv.shape[2:].numel() if sums else 0,))


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, qkv)
    ctx.sums = bias is not None


def _backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if dout is None:
        return None, None
    dqkv, dbias = _short_attention_backward_triton(dout, *ctx.saved_tensors, ctx.sums)
    return dqkv, dbias if ctx.sums else None


_short_attention_triton.register_autograd(_backward, setup_context=_setup_context)


def shape_problem(head_dim: int, query_length: int, key_length: int) -> str | None:
    """Why heads of these shapes are none for the kernels; None if they are."""
    if head_dim not in HEAD_DIMS:
        return f"takes head dims {', '.join(map(str, HEAD_DIMS))}, this is {head_dim}"
    if query_length != key_length:
        return f"takes self-attention, this is of {query_length} tokens to {key_length}"
    return None if 1 <= key_length <= LONGEST else f"takes 1 to {LONGEST} tokens, these are {key_length}"


def short_attention(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    """Self-attention of all tokens of each sample, scaled by ``1 / sqrt(D)``, by the Triton kernels.

    Args:
        qkv: ``[B, T, 3, H, D]`` packed queries, keys and values; bf16, fp16 or fp32; T up to 256, D 64, 72 or 80. If
            it is not contiguous, forward and backward copy it. Its gradient is contiguous.
        bias: ``[3 * H * D]``, contained in ``qkv`` already and of its dtype: an argument for its gradient alone, the
            sum of that of ``qkv`` over samples and tokens. None: whoever adds it sums it.

    Returns:
        ``[B, T, H * D]`` in the dtype of ``qkv``, contiguous.

    Raises:
        ValueError: another shape or dtype.
    """
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}, expected [B, T, 3, H, D]")
    if why := shape_problem(qkv.shape[4], qkv.shape[1], qkv.shape[1]):
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}: short_attention {why}; use short_attention_reference")
    if qkv.dtype not in DTYPES:
        raise ValueError(f"qkv is {qkv.dtype}, expected bfloat16, float16 or float32; use qkv.bfloat16()")
    if bias is not None and (tuple(bias.shape) != (qkv.shape[2:].numel(),) or bias.dtype != qkv.dtype):
        given, expected = f"{tuple(bias.shape)} {bias.dtype}", f"({qkv.shape[2:].numel()},) {qkv.dtype}"
        raise ValueError(f"bias is {given}, expected {expected}, the channels and dtype of qkv; use bias.to(qkv)")
    out: Tensor = _short_attention_triton(qkv, bias)[0]
    return out
