"""Arithmetic of the kernels of ``group_norm`` on blocks in registers."""

from __future__ import annotations

from fastdiff_kernels.launch import jit, tl


@jit
def not_negative(value):  # type: ignore[no-untyped-def]
    """``max(value, 0)`` that keeps NaN."""
    return tl.where(value < 0.0, 0.0, value)


@jit
def reciprocal_root(value):  # type: ignore[no-untyped-def]
    """1 / sqrt(value), each rounded correctly."""
    return tl.math.div_rn(1.0, tl.math.sqrt_rn(value))


@jit
def divide(total, number):  # type: ignore[no-untyped-def]
    """``total / number`` rounded correctly, which ``/`` is not on a GPU: so a constant input has no spread."""
    return tl.math.div_rn(total, number * 1.0)


@jit
def activation(z, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """SiLU, or ``z`` itself."""
    if SILU:
        z = z / (1.0 + tl.exp(-z))
    return z


@jit
def activation_gradient(z, dy, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of ``z`` from that of ``activation(z)``."""
    if SILU:
        sigmoid = tl.sigmoid(z)
        dy = dy * sigmoid * (1.0 + z * (1.0 - sigmoid))
    return dy


@jit
def fold_in_registers(values, group, BLOCK_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each channel the sum of ``values`` over the channels of its group; ``group`` is in [0, BLOCK_GROUPS)."""
    member = group[None, :] == tl.arange(0, BLOCK_GROUPS)[:, None]
    total = tl.sum(tl.where(member, values[None, :], 0.0), axis=1)
    return tl.sum(tl.where(member, total[:, None], 0.0), axis=0)
