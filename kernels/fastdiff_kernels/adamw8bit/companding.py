"""Eight-bit codes of Adam's moments: a square-root companding, a scale per block and dithered rounding.

A block of ``BLOCK`` neighbouring elements shares a scale ``s``, its largest magnitude. The first moment has signed
codes ``c`` of ``LEVELS_M = 127``, the root of the second moment unsigned codes of ``LEVELS_V = 255``::

    m = sign(c) * c^2 * s_m / 127^2        sqrt(v) = c * s_v / 255,  s_v the largest sqrt(v)

Both are thus square-root companded (for v as in FlashOptim, Databricks 2026, arXiv 2602.23349; for m, which it
compands by ``2x / (1 + |x|)``, the root keeps small elements 60 times finer and is decoded without a division).
A code is found by truncating ``sqrt(|m| / s_m) * 127 + u``, or ``sqrt(v / s_v^2) * 255 + u``, with a dither ``u`` in
[0, 1). Rounding to nearest instead would freeze the averages: a step changes v by (1 - beta2) = 0.1 %, less than half
a code, so v could rise and never fall, and a small m would never decay. The dither is the Weyl sequence
``u = frac((element * A + step * B + phase) / 2^32)`` in 32-bit integers, whose values over the steps are spread evenly
for each element, so that the average code over the steps is right; v takes the low and m the high 16 bits. It is a
function of the place in the parameter and of the step only.

Bound: a code of v is at least 1, so ``sqrt(v) >= s_v / 255`` for every element of a block that has a gradient. One
step of the first code of m against it is ``(s_m / 127^2) / (s_v / 255) = s_m / (63 s_v)``, 1/63 of the update of the
block's largest element: rounding cannot blow up an update. An element whose gradients stay below 1/255 of the
largest in its block moves slower than under exact Adam.

A scale of a block with a NaN is NaN and with an infinity infinite, and so decodes to no finite number. The codes of
such a block mean nothing, but for a code 0 of v: times an infinite scale it is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff_kernels.launch import jit, tl

BLOCK = 256
"""Elements that share their scales."""
LEVELS_M = 127
LEVELS_V = 255
ELEMENT_STEP = 0x9E376A09
"""A. The halves of A and B are fractions that are badly approximated by ratios: of the golden ratio and of sqrt(2)."""
TIME_STEP = 0x6A099E37
"""B."""

_WORD = 0xFFFFFFFF
SMALLEST_SCALE = 1e-33
"""Keeps the factor of a block of zeros finite; below it, codes are smaller than they could be."""


def dither_reference(phase: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
    """Dithers minus 1/2 in units of 2**-16, int16 ``[blocks, BLOCK]``, for m and for v.

    Args:
        phase: int32 ``[blocks, 1]``, that of the first element of each block.
        step: number of the step, or an int64 scalar of it.
    """
    words = phase + words_of_lanes(step, phase.device)
    halves = words.view(torch.int16).view(*words.shape, 2)
    return halves[..., 1], halves[..., 0]


def words_of_lanes(step: int | Tensor, device: torch.device) -> Tensor:
    """Weyl words of the elements of a block without its phase, int32 ``[BLOCK]``, modulo 2**32."""
    lane = torch.arange(BLOCK, dtype=torch.int64, device=device) * ELEMENT_STEP + step * TIME_STEP
    return (((lane + 2**31) & _WORD) - 2**31).to(torch.int32)


def root_(value: Tensor) -> Tensor:
    """Correctly rounded root of fp32, in place, by way of fp64: MKL, behind torch on a CPU, is off by one at times."""
    return value.copy_(value.double().sqrt_())


def decode_m_reference(codes: Tensor, scales: Tensor) -> Tensor:
    """First moment fp32 ``[blocks, BLOCK]`` of int8 codes, same shape, and fp32 scales ``[blocks, 1]``."""
    code = codes.to(torch.float32)
    return code.abs().mul_(code).mul_(scales * (1.0 / LEVELS_M**2))


def decode_root_v_reference(codes: Tensor, scales: Tensor) -> Tensor:
    """Root of the second moment, fp32 ``[blocks, BLOCK]``, of uint8 codes and fp32 scales ``[blocks, 1]``."""
    return codes.to(torch.float32).mul_(scales * (1.0 / LEVELS_V))


def encode_m_reference(m: Tensor, scales: Tensor, dither: Tensor) -> Tensor:
    """Codes int8 of fp32 ``[blocks, BLOCK]`` under scales ``[blocks, 1]``, with the first of ``dither_reference``."""
    place = m.abs().mul_(_factor(scales, LEVELS_M**2))
    root_(place).add_(dither, alpha=2.0**-16).add_(0.5).clamp_(max=LEVELS_M)
    return place.copysign_(m).to(torch.int8)


def encode_root_v_reference(root: Tensor, scales: Tensor, dither: Tensor) -> Tensor:
    """Codes uint8 of fp32 ``[blocks, BLOCK]`` under scales ``[blocks, 1]``, with the second of ``dither_reference``."""
    place = root * _factor(scales, LEVELS_V)
    return place.add_(dither, alpha=2.0**-16).add_(0.5).clamp_(1, LEVELS_V).to(torch.uint8)


def _factor(scales: Tensor, levels: int) -> Tensor:
    return scales.clamp(min=SMALLEST_SCALE).reciprocal_().mul_(levels)


@jit
def dither(phase, lane, step):  # type: ignore[no-untyped-def]
    """Two fp32 blocks of dithers minus 1/2 from an int32 phase, an int32 place in the block and a step."""
    word = phase.to(tl.uint32) + lane.to(tl.uint32) * 0x9E376A09 + step.to(tl.uint32) * 0x6A099E37
    high = word.to(tl.int32, bitcast=True) >> 16
    low = (word << 16).to(tl.int32, bitcast=True) >> 16
    return high.to(tl.float32) * 0.0000152587890625, low.to(tl.float32) * 0.0000152587890625


@jit
def decode_m(codes, scales):  # type: ignore[no-untyped-def]
    """As ``decode_m_reference``."""
    code = codes.to(tl.float32)
    return tl.abs(code) * code * (scales * (1.0 / 16129))


@jit
def decode_root_v(codes, scales):  # type: ignore[no-untyped-def]
    """As ``decode_root_v_reference``."""
    return codes.to(tl.float32) * (scales * (1.0 / 255))


@jit
def encode_m(m, scales, dither):  # type: ignore[no-untyped-def]
    """As ``encode_m_reference``, with the first of ``dither``."""
    place = tl.math.sqrt_rn(tl.abs(m) * (tl.math.div_rn(1.0, tl.maximum(scales, 1e-33)) * 16129))
    # The minimum of a NaN and a number is the number.
    code = tl.minimum(place + dither + 0.5, 127.0).to(tl.int32)
    return tl.where(m < 0, -code, code).to(tl.int8)


@jit
def encode_root_v(root, scales, dither):  # type: ignore[no-untyped-def]
    """As ``encode_root_v_reference``, with the second of ``dither``."""
    place = root * (tl.math.div_rn(1.0, tl.maximum(scales, 1e-33)) * 255)
    code = tl.maximum(tl.minimum(place + dither + 0.5, 255.0), 1.0)
    # The place of an infinite root is NaN. Code 0 times an infinite scale is NaN, too; any other code is infinity, and
    # its steps of 0 would hide it. On a GPU minimum and maximum turn NaN into 255.
    return tl.where(place == place, code, 0.0).to(tl.int32).to(tl.uint8)
