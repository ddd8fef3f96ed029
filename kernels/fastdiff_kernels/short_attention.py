"""Self-attention of up to 256 tokens on a packed projection, with a backward pass that adds in a fixed order.

For each sample and head, with queries, keys and values ``[T, D]`` and ``c = 1 / sqrt(D)`` (Vaswani et al. 2017,
arXiv:1706.03762, eq. 1)::

    s = c q k^T,   lse = log(sum(exp(s))),   p = exp(s - lse),   out = p v

Gradient (Dao et al. 2022, arXiv:2205.14135, appendix B.4), with sums over the channels of a token::

    delta = sum(dout * out),   ds = p * (dout v^T - delta)
    dq = c ds k,   dk = c ds^T q,   dv = p^T dout

One program does one head of one sample, forward and backward. It holds 64 tokens in registers and passes the others by
them through shared memory, first queries before all keys, which gives dq, then keys before all queries, which gives dk
and dv. So no two programs add to the same number, at the price of seven matrix products instead of five. A head is
0.3 MB, so that later passes should find it in the L2 cache; two programs or more fit one processor.
A program that holds all 256 keys would take all registers of a processor, and its backward spills.

Channels are held as 64 and 16, because blocks have power-of-two sizes: 72 channels cost as much as 80, not as 128.

Least bytes per element of 16 bits: forward 8 (qkv, out) and 4 / D for lse, backward 16 (qkv, out, dout, dqkv) and
12 / D for lse and delta; with 256 tokens the passes load 20 and 48, from the caches or not. On an H200, for 256 samples
of 256 tokens and 16 heads of 72 channels, they take 0.47 and 1.64 ms, those of cuDNN 0.33 and 1.32. Saved for the
backward pass, beside qkv and out: lse, ``[B, H, T]`` in fp32.

Limits: head dims 64, 72 and 80; bf16, fp16 and fp32, the last without tensor cores; Triton on sm_80 or newer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastdiff_kernels.launch import INTERPRETED, constant, jit, run, tl

HEAD_DIMS = (64, 72, 80)
LONGEST = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LOG2_E = constant(1.4426950408889634)
_LN_2 = constant(0.6931471805599453)
_INTERPRETED = constant(INTERPRETED)


def short_attention_reference(qkv: Tensor) -> Tensor:
    """``short_attention`` in plain torch, differentiable, in any floating dtype and of any length and head dim."""
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, T, 3, H, D] -> 3 x [B, H, T, D]
    scores = query @ key.transpose(-2, -1) * qkv.shape[-1] ** -0.5  # [B, H, T, T]
    mixed: Tensor = scores.softmax(-1) @ value  # [B, H, T, D]
    return mixed.transpose(1, 2).flatten(2)  # -> [B, T, H * D]


# Rows are held as two parts, of BLOCK_HEAD (_a) and BLOCK_TAIL (_b) channels; the second is unused if D is BLOCK_HEAD.


@jit
def _load(  # type: ignore[no-untyped-def]
    base_ptr, rows, T: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Both parts of ``rows``, which are ``STEP`` elements apart; 0 past the last token and channel."""
    head, tail = tl.arange(0, BLOCK_HEAD), BLOCK_HEAD + tl.arange(0, BLOCK_TAIL)
    at = rows[:, None] * STEP
    real = (rows < T)[:, None]
    if T % BLOCK_ROWS == 0:
        a = tl.load(base_ptr + at + head[None, :])
    else:
        a = tl.load(base_ptr + at + head[None, :], mask=real, other=0.0)
    if D == BLOCK_HEAD:
        b = a
    elif T % BLOCK_ROWS == 0 and D == BLOCK_HEAD + BLOCK_TAIL:
        b = tl.load(base_ptr + at + tail[None, :])
    else:
        b = tl.load(base_ptr + at + tail[None, :], mask=real & (tail < D)[None, :], other=0.0)
    return a, b


@jit
def _store(  # type: ignore[no-untyped-def]
    base_ptr, rows, a, b, T: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    head, tail = tl.arange(0, BLOCK_HEAD), BLOCK_HEAD + tl.arange(0, BLOCK_TAIL)
    at, real = rows[:, None] * STEP, (rows < T)[:, None]
    tl.store(base_ptr + at + head[None, :], a.to(base_ptr.dtype.element_ty), mask=real)
    if D > BLOCK_HEAD:
        tl.store(base_ptr + at + tail[None, :], b.to(base_ptr.dtype.element_ty), mask=real & (tail < D)[None, :])


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
def _scores(x_a, x_b, y_a, y_b, D: tl.constexpr, BLOCK_HEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """``x y^T`` of rows ``[M, D]`` and ``[N, D]``."""
    scores = _product(x_a, tl.trans(y_a), None)
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
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_HELD: tl.constexpr, BLOCK_PASSING: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program does one head of one sample."""
    program = tl.program_id(0).to(tl.int64)
    sample, head = program // H, program % H
    q_ptr, o_ptr = qkv_ptr + (sample * T * 3 * H + head) * D, out_ptr + (sample * T * H + head) * D
    for first in tl.range(0, T, BLOCK_HELD, num_stages=1):
        rows = first + tl.arange(0, BLOCK_HELD)
        q_a, q_b = _load(q_ptr, rows, T, D, 3 * H * D, BLOCK_HELD, BLOCK_HEAD, BLOCK_TAIL)
        top = tl.full((BLOCK_HELD,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_HELD,), tl.float32)
        o_a, o_b = _zeros(BLOCK_HELD, BLOCK_HEAD, BLOCK_TAIL)
        for start in tl.range(0, T, BLOCK_PASSING, num_stages=STAGES):
            keys = start + tl.arange(0, BLOCK_PASSING)
            k_a, k_b = _load(q_ptr + H * D, keys, T, D, 3 * H * D, BLOCK_PASSING, BLOCK_HEAD, BLOCK_TAIL)
            v_a, v_b = _load(q_ptr + 2 * H * D, keys, T, D, 3 * H * D, BLOCK_PASSING, BLOCK_HEAD, BLOCK_TAIL)
            s = _scores(q_a, q_b, k_a, k_b, D, BLOCK_HEAD) * (scale * _LOG2_E)
            if T % BLOCK_PASSING != 0:
                s = tl.where((keys < T)[None, :], s, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            p, shrink = tl.exp2(s - higher[:, None]), tl.exp2(top - higher)
            total, top = total * shrink + tl.sum(p, 1), higher
            o_a, o_b = _mix(p, v_a, v_b, o_a * shrink[:, None], o_b * shrink[:, None], D, BLOCK_HEAD)
        _store(o_ptr, rows, o_a / total[:, None], o_b / total[:, None], T, D, H * D, BLOCK_HEAD, BLOCK_TAIL)
        tl.store(lse_ptr + program * T + rows, (top + tl.log2(total)) * _LN_2, mask=rows < T)


@jit
def _gradient_of_queries(  # type: ignore[no-untyped-def]
    dq_ptr, delta_ptr, do_ptr, o_ptr, lse_ptr, q_ptr, scale, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK_HELD: tl.constexpr, BLOCK_PASSING: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``dq`` and ``delta`` of one head; all keys and values pass each block of queries."""
    for first in tl.range(0, T, BLOCK_HELD, num_stages=1):
        rows = first + tl.arange(0, BLOCK_HELD)
        do_a, do_b = _load(do_ptr, rows, T, D, H * D, BLOCK_HELD, BLOCK_HEAD, BLOCK_TAIL)
        o_a, o_b = _load(o_ptr, rows, T, D, H * D, BLOCK_HELD, BLOCK_HEAD, BLOCK_TAIL)
        delta = tl.sum(o_a.to(tl.float32) * do_a.to(tl.float32), 1)
        if D > BLOCK_HEAD:
            delta += tl.sum(o_b.to(tl.float32) * do_b.to(tl.float32), 1)
        tl.store(delta_ptr + rows, delta, mask=rows < T)
        q_a, q_b = _load(q_ptr, rows, T, D, 3 * H * D, BLOCK_HELD, BLOCK_HEAD, BLOCK_TAIL)
        lse = tl.load(lse_ptr + rows, mask=rows < T, other=0.0) * _LOG2_E
        dq_a, dq_b = _zeros(BLOCK_HELD, BLOCK_HEAD, BLOCK_TAIL)
        for start in tl.range(0, T, BLOCK_PASSING, num_stages=STAGES):
            keys = start + tl.arange(0, BLOCK_PASSING)
            k_a, k_b = _load(q_ptr + H * D, keys, T, D, 3 * H * D, BLOCK_PASSING, BLOCK_HEAD, BLOCK_TAIL)
            v_a, v_b = _load(q_ptr + 2 * H * D, keys, T, D, 3 * H * D, BLOCK_PASSING, BLOCK_HEAD, BLOCK_TAIL)
            p = tl.exp2(_scores(q_a, q_b, k_a, k_b, D, BLOCK_HEAD) * (scale * _LOG2_E) - lse[:, None])
            if T % BLOCK_PASSING != 0:  # exp(-lse) of a token that does not exist may be infinite
                p = tl.where((keys < T)[None, :], p, 0.0)
            ds = p * (_scores(do_a, do_b, v_a, v_b, D, BLOCK_HEAD) - delta[:, None])
            dq_a, dq_b = _mix(ds, k_a, k_b, dq_a, dq_b, D, BLOCK_HEAD)
        _store(dq_ptr, rows, dq_a * scale, dq_b * scale, T, D, 3 * H * D, BLOCK_HEAD, BLOCK_TAIL)


@jit
def _gradients_of_keys_and_values(  # type: ignore[no-untyped-def]
    dq_ptr, delta_ptr, do_ptr, lse_ptr, q_ptr, scale, T: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK_HELD: tl.constexpr, BLOCK_PASSING: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``dk`` and ``dv`` of one head; all queries pass each block of keys, so scores are held transposed."""
    for first in tl.range(0, T, BLOCK_HELD, num_stages=1):
        keys = first + tl.arange(0, BLOCK_HELD)
        k_a, k_b = _load(q_ptr + H * D, keys, T, D, 3 * H * D, BLOCK_HELD, BLOCK_HEAD, BLOCK_TAIL)
        v_a, v_b = _load(q_ptr + 2 * H * D, keys, T, D, 3 * H * D, BLOCK_HELD, BLOCK_HEAD, BLOCK_TAIL)
        dk_a, dk_b = _zeros(BLOCK_HELD, BLOCK_HEAD, BLOCK_TAIL)
        dv_a, dv_b = _zeros(BLOCK_HELD, BLOCK_HEAD, BLOCK_TAIL)
        for start in tl.range(0, T, BLOCK_PASSING, num_stages=STAGES):
            rows = start + tl.arange(0, BLOCK_PASSING)
            q_a, q_b = _load(q_ptr, rows, T, D, 3 * H * D, BLOCK_PASSING, BLOCK_HEAD, BLOCK_TAIL)
            do_a, do_b = _load(do_ptr, rows, T, D, H * D, BLOCK_PASSING, BLOCK_HEAD, BLOCK_TAIL)
            lse = tl.load(lse_ptr + rows, mask=rows < T, other=0.0) * _LOG2_E
            delta = tl.load(delta_ptr + rows, mask=rows < T, other=0.0)
            # A query that does not exist has dout = 0 and delta = 0, and adds nothing.
            p = tl.exp2(_scores(k_a, k_b, q_a, q_b, D, BLOCK_HEAD) * (scale * _LOG2_E) - lse[None, :])
            dv_a, dv_b = _mix(p, do_a, do_b, dv_a, dv_b, D, BLOCK_HEAD)
            ds = p * (_scores(v_a, v_b, do_a, do_b, D, BLOCK_HEAD) - delta[None, :])
            dk_a, dk_b = _mix(ds, q_a, q_b, dk_a, dk_b, D, BLOCK_HEAD)
        _store(dq_ptr + H * D, keys, dk_a * scale, dk_b * scale, T, D, 3 * H * D, BLOCK_HEAD, BLOCK_TAIL)
        _store(dq_ptr + 2 * H * D, keys, dv_a, dv_b, T, D, 3 * H * D, BLOCK_HEAD, BLOCK_TAIL)


@jit
def _short_attention_bwd_kernel(  # type: ignore[no-untyped-def]
    dqkv_ptr, delta_ptr, dout_ptr, out_ptr, lse_ptr, qkv_ptr, scale,
    T: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_HELD: tl.constexpr, BLOCK_PASSING: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program does one head of one sample."""
    program = tl.program_id(0).to(tl.int64)
    sample, head = program // H, program % H
    packed, plain = (sample * T * 3 * H + head) * D, (sample * T * H + head) * D
    _gradient_of_queries(
        dqkv_ptr + packed, delta_ptr + program * T, dout_ptr + plain, out_ptr + plain, lse_ptr + program * T,
        qkv_ptr + packed, scale, T, H, D, BLOCK_HELD, BLOCK_PASSING, BLOCK_HEAD, BLOCK_TAIL, STAGES,
    )  # fmt: skip
    tl.debug_barrier()  # delta is read by other threads than those that wrote it
    _gradients_of_keys_and_values(
        dqkv_ptr + packed, delta_ptr + program * T, dout_ptr + plain, lse_ptr + program * T,
        qkv_ptr + packed, scale, T, H, D, BLOCK_HELD, BLOCK_PASSING, BLOCK_HEAD, BLOCK_TAIL, STAGES,
    )  # fmt: skip


def _constants(qkv: Tensor, *, backward: bool) -> dict[str, Any]:
    """Blocks, warps and stages, as large as `bench aot` compiles without spills."""
    _, length, _, heads, head_dim = qkv.shape
    if qkv.dtype == torch.float32:  # its products are not those of tensor cores, and hold their operands in registers
        held, passing, stages = 16, 16, 1
    else:
        held, passing, stages = 64, 32 if backward or length % 64 else 64, 2
    return {
        "T": length, "H": heads, "D": head_dim, "BLOCK_HELD": held, "BLOCK_PASSING": passing, "BLOCK_HEAD": 64,
        "BLOCK_TAIL": 16, "STAGES": stages, "num_warps": 4,
    }  # fmt: skip


@torch.library.custom_op("fastdiff::short_attention", mutates_args=())
def _short_attention_triton(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Output ``[B, T, H * D]`` and fp32 log-sum-exp ``[B, H, T]``."""
    out, lse = _empty(qkv)
    samples, _, _, heads, head_dim = qkv.shape
    run(
        _short_attention_fwd_kernel, (samples * heads,),
        out, lse, qkv.contiguous(), head_dim**-0.5, **_constants(qkv, backward=False),
    )  # fmt: skip
    return out, lse


def _empty(qkv: Tensor) -> tuple[Tensor, Tensor]:
    samples, length, _, heads, head_dim = qkv.shape
    out = qkv.new_empty((samples, length, heads * head_dim))
    return out, qkv.new_empty((samples, heads, length), dtype=torch.float32)


_short_attention_triton.register_fake(_empty)


@torch.library.custom_op("fastdiff::short_attention_backward", mutates_args=())
def _short_attention_backward_triton(dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor) -> Tensor:
    """Gradient of ``qkv``, contiguous."""
    dqkv = qkv.new_empty(qkv.shape)
    samples, _, _, heads, head_dim = qkv.shape
    run(
        _short_attention_bwd_kernel, (samples * heads,),
        dqkv, lse.new_empty(lse.shape), dout.contiguous(), out.contiguous(), lse.contiguous(), qkv.contiguous(),
        head_dim**-0.5,
        **_constants(qkv, backward=True),
    )  # fmt: skip
    return dqkv


@_short_attention_backward_triton.register_fake
def _(dout: Tensor, out: Tensor, lse: Tensor, qkv: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *inputs)


def _backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> Tensor | None:
    if dout is None:
        return None
    gradient: Tensor = _short_attention_backward_triton(dout, *ctx.saved_tensors)
    return gradient


_short_attention_triton.register_autograd(_backward, setup_context=_setup_context)


def shape_problem(head_dim: int, query_length: int, key_length: int) -> str | None:
    """Why heads of these shapes are none for the kernels; None if they are."""
    if head_dim not in HEAD_DIMS:
        return f"takes head dims {', '.join(map(str, HEAD_DIMS))}, this is {head_dim}"
    if query_length != key_length:
        return f"takes self-attention, this is of {query_length} tokens to {key_length}"
    return None if 1 <= key_length <= LONGEST else f"takes 1 to {LONGEST} tokens, these are {key_length}"


def short_attention(qkv: Tensor) -> Tensor:
    """Self-attention of all tokens of each sample, scaled by ``1 / sqrt(D)``, by the Triton kernels.

    Args:
        qkv: ``[B, T, 3, H, D]`` packed queries, keys and values; bf16, fp16 or fp32; T up to 256, D 64, 72 or 80. If
            it is not contiguous, forward and backward copy it. Its gradient is contiguous.

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
    out: Tensor = _short_attention_triton(qkv)[0]
    return out
