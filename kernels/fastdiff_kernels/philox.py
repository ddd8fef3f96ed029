"""Philox4x32-10: random numbers that are a pure function of (seed, stream, position, element).

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3. Ten rounds turn the
counter ``(element // 4, stream, position low, position high)``, four words of 32 bits, into four random words
under the 64-bit key ``seed``; ``element % 4`` picks the word. One round maps ``(c0, c1, c2, c3)`` under the
key ``(k0, k1)`` to ``(high(M1*c2) ^ c1 ^ k0, low(M1*c2), high(M0*c0) ^ c3 ^ k1, low(M0*c0))`` and adds ``(W0,
W1)`` to the key.

A word becomes a uniform number by folding its signed value into 31 bits and scaling, as ``triton.language.rand``
does, and two words become two normal numbers by the method of Box & Muller 1958.

Words, uniform and normal numbers agree to the bit between eager torch and Triton: logarithm, sine and cosine are
written out in additions, products, one division and one square root, which every machine rounds alike as long as no
product and sum are fused (the kernels are compiled without that). The libraries' own functions differ in the last
places, and those of a GPU are fast, coarse (the logarithm near 1) and in need of a stack frame (sine and cosine). A
normal number is within ``NORMAL_ULPS`` units in the last place of fp32 of the exact function of its two words.
``torch.compile`` of the reference fuses products and sums and differs by as much.

Bytes moved: 8 per position are read; 4 per number are written (8 for ``bits``). There is no backward pass.
Limits: 2**34 numbers per position and stream.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import constant, jit, run, tl, triton
from fastdiff_kernels.names import Backend

Kind = Literal["bits", "uniform", "normal"]

NORMAL_ULPS = 3
"""Largest error of a normal number, in units of the last place of fp32."""

SEED_MASK = 0xFFFFFFFFFFFFFFFF
"""Mask that converts the result of ``signed`` back to the seed in [0, 2**64)."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_FOLDED_SCALE = 4.6566127342e-10  # the largest fp32 whose product with 2**31 - 1 is below 1
_SMALLEST = 1.0e-7  # keeps the logarithm finite


# Constants of the logarithm: bits of the fp32 below sqrt(1/2), of the mantissa and of 1; ln 2 in two parts, of which
# the first has so few bits that its product with an exponent is exact.
_ROOT_HALF = 0x3F3504F3
_MANTISSA = 0x7FFFFF
_ONE = 0x3F800000
_LN2_HIGH = 0.693145751953125
_LN2_LOW = math.log(2.0) - _LN2_HIGH
# Taylor coefficients in squares, highest power first: of log((1 + s) / (1 - s)) / s - 2, and of the sine and cosine of
# quarter turns after their first terms. The first term of the sine is split into an fp32 and a remainder.
_TURN = math.pi / 2
_SIN_FIRST = 1.57079637050628662109375
_LOG_SERIES = tuple(2.0 / (2 * k + 1) for k in (4, 3, 2, 1))
_SIN_SERIES = (
    *((-1) ** k * _TURN ** (2 * k + 1) / math.factorial(2 * k + 1) for k in (4, 3, 2, 1)),
    _TURN - _SIN_FIRST,
)
_COS_SERIES = tuple((-1) ** k * _TURN ** (2 * k) / math.factorial(2 * k) for k in (5, 4, 3, 2, 1))

_GROUPS_PER_PROGRAM = 256


def philox_reference(
    seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 in plain torch.

    Args:
        seed: key in [0, 2**64); its low half is the first key word.
        c0: int64 tensor of values in [0, 2**32), the first counter word.
        c1: second counter word, likewise; the four shapes broadcast.
        c2: third counter word.
        c3: fourth counter word.

    Returns:
        Four int64 tensors of values in [0, 2**32).
    """
    key0, key1 = seed & _WORD, seed >> 32
    for _ in range(_ROUNDS):
        # The int64 products wrap, but all of their 64 bits are right. A word is cut to 32 bits only where the next
        # round multiplies it.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> 32) ^ c1, (product0 >> 32) ^ c3
        c0.bitwise_xor_(key0).bitwise_and_(_WORD)
        c2.bitwise_xor_(key1).bitwise_and_(_WORD)
        c1, c3 = product1, product0
        key0, key1 = (key0 + _KEY_STEPS[0]) & _WORD, (key1 + _KEY_STEPS[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def bits_reference(seed: int, stream: int, position: Tensor, count: int) -> Tensor:
    """Words of ``[B]`` int64 positions: ``[B, 4 * ceil(count / 4)]`` int64 of values in [0, 2**32)."""
    group = torch.arange(-(-count // 4), device=position.device)[None, :]
    low, high = position[:, None] & _WORD, (position[:, None] >> 32) & _WORD
    words = philox_reference(seed, group, torch.full_like(group, stream), low, high)
    return torch.stack(words, dim=-1).flatten(1)  # 4 x [B, groups] -> [B, 4 * groups]


def uniform_reference(words: Tensor) -> Tensor:
    """Uniform fp32 in [0, 1) of int64 words of the same shape: the top bit folds onto the other 31."""
    folded = torch.minimum(words, _WORD - words)
    return folded.to(torch.float32) * _FOLDED_SCALE


def _polynomial(square: Tensor, series: tuple[float, ...]) -> Tensor:
    value = square * series[0] + series[1]
    for coefficient in series[2:]:
        value = value * square + coefficient
    return value


def _log(number: Tensor) -> Tensor:
    """Natural logarithm of normal fp32: ``m * 2**k`` with ``m`` around 1, ``log(m)`` by its series in (m-1)/(m+1)."""
    shifted = number.view(torch.int32) + (_ONE - _ROOT_HALF)
    exponent = ((shifted >> 23) - 127).to(torch.float32)
    f = ((shifted & _MANTISSA) + _ROOT_HALF).view(torch.float32) - 1.0
    s = f / (f + 2.0)
    half_square = 0.5 * f * f
    square = s * s
    correction = s * (half_square + square * _polynomial(square, _LOG_SERIES)) + exponent * _LN2_LOW
    return exponent * _LN2_HIGH - (half_square - correction - f)


def _cos_sin(turns: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``turns`` in [0, 1) full turns: the nearest quarter is taken off exactly."""
    quarters = turns * 4.0
    quadrant = (quarters + 0.5).floor()
    r = quarters - quadrant
    square = r * r
    sin = r * _SIN_FIRST + r * _polynomial(square, _SIN_SERIES)
    cos = 1.0 + square * _polynomial(square, _COS_SERIES)
    number = quadrant.to(torch.int32)
    odd = (number & 1) == 1
    c, s = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    return torch.where(((number + 1) & 2) == 2, -c, c), torch.where((number & 2) == 2, -s, s)


def normal_reference(words: Tensor) -> Tensor:
    """Standard normal fp32 of int64 words ``[..., 2k]``, same shape; each pair of neighbours makes a pair."""
    uniforms = uniform_reference(words)
    # By way of fp64, which rounds to the right fp32: torch.sqrt on a CPU (MKL) is off by one in a sixth of the cases.
    radius = (-2.0 * _log(uniforms[..., 0::2].clamp(min=_SMALLEST))).double().sqrt().to(torch.float32)
    cos, sin = _cos_sin(uniforms[..., 1::2])
    return torch.stack([radius * cos, radius * sin], dim=-1).flatten(-2)


def _reference(seed: int, stream: int, position: Tensor, count: int, kind: Kind) -> Tensor:
    words = bits_reference(seed, stream, position, count)
    if kind != "bits":
        words = uniform_reference(words) if kind == "uniform" else normal_reference(words)
    return words[:, :count].contiguous()


@jit
def philox_words(seed, stream, position, group):  # type: ignore[no-untyped-def]
    """Four uint32 blocks: the words of an int64 block of groups (element // 4) at one int64 position."""
    c0 = group.to(tl.uint32)
    zero = c0 ^ c0
    c1 = (zero + stream).to(tl.uint32)
    return tl.philox(seed, c0, c1, zero + position.to(tl.uint32), zero + (position >> 32).to(tl.uint32))


ONE, ROOT_HALF, MANTISSA = constant(_ONE), constant(_ROOT_HALF), constant(_MANTISSA)
LN2_HIGH, LN2_LOW, SIN_FIRST = constant(_LN2_HIGH), constant(_LN2_LOW), constant(_SIN_FIRST)
LOG_SERIES, SIN_SERIES, COS_SERIES = constant(_LOG_SERIES), constant(_SIN_SERIES), constant(_COS_SERIES)


@jit
def _polynomial_block(square, SERIES: tl.constexpr, TERMS: tl.constexpr):  # type: ignore[no-untyped-def]
    value = square * SERIES[0] + SERIES[1]
    for k in tl.static_range(2, TERMS):
        value = value * square + SERIES[k]
    return value


@jit
def _log_block(number):  # type: ignore[no-untyped-def]
    """``_log`` of an fp32 block."""
    shifted = number.to(tl.int32, bitcast=True) + (ONE - ROOT_HALF)
    exponent = ((shifted >> 23) - 127).to(tl.float32)
    f = ((shifted & MANTISSA) + ROOT_HALF).to(tl.float32, bitcast=True) - 1.0
    s = tl.math.div_rn(f, f + 2.0)
    half_square = 0.5 * f * f
    square = s * s
    correction = s * (half_square + square * _polynomial_block(square, LOG_SERIES, 4)) + exponent * LN2_LOW
    return exponent * LN2_HIGH - (half_square - correction - f)


@jit
def _cos_sin_block(turns):  # type: ignore[no-untyped-def]
    """``_cos_sin`` of an fp32 block."""
    quarters = turns * 4.0
    quadrant = tl.floor(quarters + 0.5)
    r = quarters - quadrant
    square = r * r
    sin = r * SIN_FIRST + r * _polynomial_block(square, SIN_SERIES, 5)
    cos = 1.0 + square * _polynomial_block(square, COS_SERIES, 5)
    number = quadrant.to(tl.int32)
    odd = (number & 1) == 1
    c, s = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((number + 1) & 2) == 2, -c, c), tl.where((number & 2) == 2, -s, s)


@jit
def box_muller(word1, word2):  # type: ignore[no-untyped-def]
    """Two fp32 blocks of standard normal numbers from two uint32 blocks of words.

    Equal to ``normal_reference`` to the bit in a kernel that is launched with ``enable_fp_fusion=False``.
    """
    u1, u2 = tl.uint_to_uniform_float(word1), tl.uint_to_uniform_float(word2)
    radius = tl.math.sqrt_rn(-2.0 * _log_block(tl.maximum(1.0e-7, u1)))
    cos, sin = _cos_sin_block(u2)
    return radius * cos, radius * sin


@jit
def _philox_kernel(out_ptr, position_ptr, seed, stream, count, tiles, KIND: tl.constexpr, BLOCK_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program writes ``4 * BLOCK_GROUPS`` consecutive numbers of one position."""
    program = tl.program_id(0).to(tl.int64)
    row, tile = program // tiles, program % tiles
    group = tile * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    w0, w1, w2, w3 = philox_words(seed, stream, tl.load(position_ptr + row), group)
    if KIND == "normal":
        w0, w1 = box_muller(w0, w1)
        w2, w3 = box_muller(w2, w3)
    elif KIND == "uniform":
        w0, w1 = tl.uint_to_uniform_float(w0), tl.uint_to_uniform_float(w1)
        w2, w3 = tl.uint_to_uniform_float(w2), tl.uint_to_uniform_float(w3)
    # Interleaving evens and odds gives each thread four neighbours: one store of 16 bytes.
    values = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    element = tile * (4 * BLOCK_GROUPS) + tl.arange(0, 4 * BLOCK_GROUPS)
    tl.store(out_ptr + row * count + element, values.to(out_ptr.dtype.element_ty), mask=element < count)


def signed(seed: int) -> int:
    """``seed`` of [0, 2**64) as the signed int64 of an op's schema; raises ValueError for another."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} is out of range, expected 0 <= seed < 2**64; use seed % 2**64")
    return seed - 2**64 if seed >= 2**63 else seed


def _validate(seed: int, stream: int, position: Tensor, count: int) -> None:
    if position.dtype != torch.int64 or position.dim() != 1:
        raise ValueError(
            f"position is {position.dtype} of shape {tuple(position.shape)}, expected int64 of shape [B]; "
            "use position.long().flatten()"
        )
    signed(seed)
    if not 0 <= stream < 2**32:
        raise ValueError(f"stream {stream} is out of range, expected 0 <= stream < 2**32")
    if not 0 < count <= 2**34:
        raise ValueError(f"count {count} is out of range, expected 0 < count <= 2**34 numbers per position")


def _empty(position: Tensor, count: int, kind: str) -> Tensor:
    dtype = torch.int64 if kind == "bits" else torch.float32
    return position.new_empty(position.shape[0], count, dtype=dtype)


@torch.library.custom_op("fastdiff::philox", mutates_args=())
def _philox_triton(position: Tensor, seed: int, stream: int, count: int, kind: str) -> Tensor:
    """Launch the kernel; ``seed`` is folded into the signed int64 of the op's schema."""
    out = _empty(position, count, kind)
    tiles = triton.cdiv(count, 4 * _GROUPS_PER_PROGRAM)
    run(
        _philox_kernel, (position.shape[0] * tiles,),
        out, position.contiguous(), seed & SEED_MASK, stream, count, tiles, KIND=kind, BLOCK_GROUPS=_GROUPS_PER_PROGRAM,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


@_philox_triton.register_fake
def _(position: Tensor, seed: int, stream: int, count: int, kind: str) -> Tensor:
    return _empty(position, count, kind)


def _draw(seed: int, stream: int, position: Tensor, count: int, kind: Kind, backend: Backend | None) -> Tensor:
    _validate(seed, stream, position, count)
    chosen = choose("philox", position, backend)
    if chosen != "triton":
        drawn: Tensor = plain(_reference, chosen)(seed, stream, position, count, kind)
        return drawn
    out: Tensor = _philox_triton(position, signed(seed), stream, count, kind)
    return out


def bits(seed: int, stream: int, position: Tensor, count: int, backend: Backend | None = None) -> Tensor:
    """Random words.

    Args:
        seed: key, in [0, 2**64).
        stream: purpose of the numbers, in [0, 2**32).
        position: ``[B]`` int64; each value has its own numbers.
        count: numbers per position, in [1, 2**34].
        backend: implementation; None: the default of ``dispatch.choose``.

    Returns:
        ``[B, count]`` int64 of values in [0, 2**32), on the device of ``position``.

    Raises:
        ValueError: ``position`` is not a vector of int64; ``seed``, ``stream``, ``count`` or ``backend`` out of range.
        RuntimeError: Triton was requested and cannot run here.
    """
    return _draw(seed, stream, position, count, "bits", backend)


def uniform(seed: int, stream: int, position: Tensor, count: int, backend: Backend | None = None) -> Tensor:
    """Uniform numbers in [0, 1): ``[B, count]`` fp32. Arguments and errors as for ``bits``."""
    return _draw(seed, stream, position, count, "uniform", backend)


def normal(seed: int, stream: int, position: Tensor, count: int, backend: Backend | None = None) -> Tensor:
    """Standard normal numbers: ``[B, count]`` fp32. Arguments and errors as for ``bits``."""
    return _draw(seed, stream, position, count, "normal", backend)
