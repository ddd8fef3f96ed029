"""Stochastic rounding of fp32 to bf16.

A number between two neighbours of bf16 becomes the upper with a probability equal to its place between them, so that
updates that are smaller than the distance of the neighbours are kept on average (Gupta et al. 2015, "Deep learning with
limited numerical precision"). 16 random bits are added to the fp32 pattern and its low 16 bits are cut off. The bits
are words of Philox (``philox``) under ``(seed, STREAM, phase of the block and step, element of the block)``; the phase
(``blocks``) depends on the place in the parameter only. What is not finite stays what it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff_kernels.adamw8bit.companding import BLOCK
from fastdiff_kernels.launch import jit, tl
from fastdiff_kernels.philox import philox_reference, philox_words

STREAM = 256
"""Stream of the generator; the trainer's own are smaller."""


def round_to_bf16_reference(value: Tensor, phase: Tensor, step: int | Tensor, seed: int) -> Tensor:
    """Round fp32 ``[blocks, BLOCK]`` to bf16, with the int32 ``phase`` ``[blocks, 1]`` of each block."""
    group = torch.arange(BLOCK // 4, device=value.device)[None, :]
    stream, low = torch.full_like(group, STREAM), torch.zeros_like(group) + (step & 0xFFFFFFFF)
    words = philox_reference(seed, group, stream, low, phase.long() & 0xFFFFFFFF)
    noise = torch.stack([word.broadcast_to(words[1].shape) for word in words], -1).flatten(1) & 0xFFFF
    pattern = (value.contiguous().view(torch.int32).long() + noise) & 0xFFFF0000
    rounded = torch.where(pattern > 0x7FFFFFFF, pattern - 2**32, pattern).to(torch.int32).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


@jit
def round_to_bf16(value, phase, step, seed, BLOCK_ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """As ``round_to_bf16_reference``; ``value`` ``[BLOCK_ROWS, 256]``, ``phase`` int32 ``[BLOCK_ROWS]``."""
    group = tl.zeros([BLOCK_ROWS, 64], tl.int64) + tl.arange(0, 64)[None, :]
    position = (phase.to(tl.int64) << 32) + step.to(tl.int64)
    w0, w1, w2, w3 = philox_words(seed, 256, position[:, None], group)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    pattern = (value.to(tl.uint32, bitcast=True) + (word & 0xFFFF)) & 0xFFFF0000
    finite = tl.abs(value) < float("inf")
    return tl.where(finite, pattern.to(tl.float32, bitcast=True), value).to(tl.bfloat16)
