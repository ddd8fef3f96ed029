"""The cast to e4m3, and maxima, inside a Triton kernel."""

from __future__ import annotations

from fastdiff_kernels.fp8.values import LARGEST
from fastdiff_kernels.launch import INTERPRETED, constant, jit, tl

_INTERPRETED = constant(INTERPRETED)
_LARGEST = constant(LARGEST)


@jit
def to_e4m3(number):  # type: ignore[no-untyped-def]
    """Round fp32 numbers, divided by their unit already, to e4m3; nearest even, up to 448, NaN stays.

    One conversion of sm_89 (``cvt.rn.satfinite.e4m3x2.f32``) does it. The interpreter cuts bits off instead, so there
    the numbers are rounded before.
    """
    if _INTERPRETED:
        kept = tl.clamp(number, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        # Adding and subtracting 1.5 * 2^23 of the last place that is kept rounds to that place.
        exponent = tl.maximum((kept.to(tl.int32, bitcast=True) >> 23) & 255, 121)
        large = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
        rounded = (kept + large) - large
        number = tl.where(rounded == 0.0, kept * 0.0, rounded)  # with its sign
        bits = tl.where(number == number, number.to(tl.int32, bitcast=True), 0x7FF00000)  # the bits of the NaN
        number = bits.to(tl.float32, bitcast=True)
    return number.to(tl.float8e4nv)


@jit
def magnitude(values):  # type: ignore[no-untyped-def]
    """The bits of absolute fp32 values, int32: in the same order, NaN above all, which maxima of fp32 would drop."""
    return tl.abs(values).to(tl.int32, bitcast=True)


@jit
def largest(magnitudes):  # type: ignore[no-untyped-def]
    """The largest absolute value in fp32, of ``magnitude`` of one or two axes; NaN if there is any."""
    return tl.max(magnitudes).to(tl.float32, bitcast=True)


@jit
def inverse(unit_ptr):  # type: ignore[no-untyped-def]
    """One divided by the unit at a pointer; exact, as units are powers of two."""
    return 1.0 / tl.load(unit_ptr)
