"""Dropout whose mask is a pure function of (seed, stream, position, element), so that it is drawn again, not stored.

``y = keep * x / (1 - p)``, where ``keep = uniform >= p`` (Srivastava et al. 2014, "Dropout: a simple way to prevent
neural networks from overfitting", section 10, scaled while training), and the gradient of x is the same function of
that of y. A dropped element is 0 even if x is not finite there.

The uniform numbers are those of ``philox.py``: key ``seed``, counter ``(element // 4, stream, position low, position
high)``. Elements are numbered in the order in which channels_last memory has them: element ``place * C + channel`` of a
sample, places in row-major order. So the mask of a sample depends on its position in the run and its shape, and not
on its batch. Layers with different masks have different streams.

Bytes moved per element of a 2-byte x: 4 forward and 4 backward, the limit, and 16 per program of 2048 elements. With a
mask stored as bytes they would be 5 and 5.
Limits: channels_last maps; 2**34 elements per sample. A gradient in another order is copied once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastdiff_kernels import philox
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import jit, run, tl, triton
from fastdiff_kernels.names import Backend
from fastdiff_kernels.philox import SEED_MASK, philox_words, signed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GROUPS_PER_PROGRAM = 512
_GROUPS_PER_WARP = 128
_WORD = 0xFFFFFFFF


def dropout_reference(x: Tensor, p: float, seed: int, stream: Tensor, position: Tensor) -> Tensor:
    """``dropout`` in plain torch, of any floating dtype; arguments as there, the stream as a tensor."""
    exact, elements = torch.promote_types(torch.float32, x.dtype), x.shape[1:].numel()
    group, place = torch.arange(-(-elements // 4), device=x.device), position[:, None]
    words = philox.philox_reference(seed, group, stream & _WORD, place & _WORD, (place >> 32) & _WORD)
    keep = torch.stack([philox.uniform_reference(word) >= p for word in words], dim=-1).flatten(1)[:, :elements]
    keep = keep.reshape(x.movedim(1, -1).shape).movedim(-1, 1)  # [N, ... * C] -> [N, ..., C] -> [N, C, ...]
    return torch.where(keep, x.to(exact) * (1 / (1 - p)), 0).to(x.dtype)


@jit
def _dropout_kernel(  # type: ignore[no-untyped-def]
    y_ptr, x_ptr, position_ptr, seed, stream_ptr, p, scale, elements, tiles, BLOCK_GROUPS: tl.constexpr
):
    """One program writes ``4 * BLOCK_GROUPS`` consecutive elements of one sample."""
    program = tl.program_id(0).to(tl.int64)
    row, tile = program // tiles, program % tiles
    group = tile * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    w0, w1, w2, w3 = philox_words(seed, tl.load(stream_ptr), tl.load(position_ptr + row), group)
    # Interleaving evens and odds puts the four words of a group side by side.
    share = tl.uint_to_uniform_float(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
    element = tile * (4 * BLOCK_GROUPS) + tl.arange(0, 4 * BLOCK_GROUPS)
    inside = element < elements
    value = tl.load(x_ptr + row * elements + element, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(share >= p, value * scale, 0.0)
    tl.store(y_ptr + row * elements + element, value.to(y_ptr.dtype.element_ty), mask=inside)


def _validate(x: Tensor, p: float, stream: int | Tensor, position: Tensor, chosen: Backend) -> None:
    if x.dim() < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [N, C, ...]; use x.reshape(N, C, -1)")
    if x.dtype not in (*_DTYPES, *([] if chosen == "triton" else [torch.float64])):
        raise ValueError(f"x is {x.dtype}, expected float32, bfloat16 or float16; use x.float()")
    if not x.movedim(1, -1).is_contiguous():
        raise ValueError(
            f"x of shape {tuple(x.shape)} has strides {x.stride()}, expected those of channels_last memory; "
            "use x.contiguous(memory_format=torch.channels_last)"
        )
    if x.shape[1:].numel() > 2**34:
        raise ValueError(f"x of shape {tuple(x.shape)} has more than 2**34 elements per sample, expected fewer")
    if not 0 <= p < 1:
        raise ValueError(f"p {p}: expected a share of at least 0 and below 1")
    _validate_stream(x, stream)
    if position.dtype != torch.int64 or position.shape != x.shape[:1]:
        given = f"{position.dtype} of shape {tuple(position.shape)}"
        raise ValueError(f"position is {given}, expected torch.int64 of shape {tuple(x.shape[:1])}, one per sample")
    if position.device != x.device:
        raise ValueError(f"position is on {position.device}, expected {x.device} like x; use position.to(x.device)")


def _validate_stream(x: Tensor, stream: int | Tensor) -> None:
    if isinstance(stream, int):
        if not 0 <= stream < 2**32:
            raise ValueError(f"stream {stream} is out of range, expected 0 <= stream < 2**32")
        return
    if stream.dtype != torch.int64 or stream.dim():
        given = f"{stream.dtype} of shape {tuple(stream.shape)}"
        raise ValueError(f"stream is {given}, expected torch.int64 of shape (), or an int")
    if stream.device != x.device:
        raise ValueError(f"stream is on {stream.device}, expected {x.device} like x; use stream.to(x.device)")


@torch.library.custom_op("fastdiff::dropout", mutates_args=())
def _dropout_triton(x: Tensor, position: Tensor, stream: Tensor, p: float, seed: int) -> Tensor:
    """Launch the kernel; ``seed`` is folded into the signed int64 of the op's schema."""
    y = torch.empty_like(x)
    elements = x.shape[1:].numel()
    groups = min(_GROUPS_PER_PROGRAM, max(16, triton.next_power_of_2(triton.cdiv(elements, 4))))
    tiles = triton.cdiv(elements, 4 * groups)
    run(
        _dropout_kernel, (x.shape[0] * tiles,),
        y, x, position, seed & SEED_MASK, stream, p, 1 / (1 - p), elements, tiles,
        BLOCK_GROUPS=groups, num_warps=max(1, groups // _GROUPS_PER_WARP),
    )  # fmt: skip
    return y


@_dropout_triton.register_fake
def _(x: Tensor, position: Tensor, stream: Tensor, p: float, seed: int) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, position, stream, *ctx.drawn = inputs
    ctx.save_for_backward(position, stream)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dy = dy.movedim(1, -1).contiguous().movedim(-1, 1)
    return _dropout_triton(dy, *ctx.saved_tensors, *ctx.drawn), None, None, None, None


_dropout_triton.register_autograd(_backward, setup_context=_setup_context)


def dropout(
    x: Tensor, p: float, *, seed: int, stream: int | Tensor, position: Tensor, backend: Backend | None = None
) -> Tensor:
    """Set each value to 0 with probability ``p`` and divide the others by ``1 - p``.

    Args:
        x: ``[N, C, ...]`` fp32, bf16 or fp16, without Triton also fp64; channels_last.
        p: share that is dropped, in [0, 1).
        seed: key of the mask, in [0, 2**64).
        stream: purpose of the mask, in [0, 2**32). Of a tensor (int64, no axes) the low 32 bits count; one compiled
            graph then serves all streams, while an int is compiled in.
        position: ``[N]`` int64 position of each sample in the run.
        backend: implementation; None: the default of ``dispatch.choose``.

    Returns:
        The output, of x's shape, dtype and strides.

    Raises:
        ValueError: a shape, dtype, device, stride or number that is not as above; the message says which.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = choose("dropout", x, backend)
    _validate(x, p, stream, position, chosen)
    folded = signed(seed)
    drawn = stream if isinstance(stream, Tensor) else position.new_full((), stream)
    if chosen != "triton":
        plainly: Tensor = plain(dropout_reference, chosen)(x, p, seed, drawn, position)
        return plainly
    out: Tensor = _dropout_triton(x, position.contiguous(), drawn, p, folded)
    return out
