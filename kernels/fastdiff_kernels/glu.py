"""Gated linear units: one half of a linear layer's output times an activation of the other.

The shared parts of ``geglu.py`` and ``swiglu.py``. For an activation ``g P(g)``, with slope ``Q`` its derivative::

    y = v g P(g),   dv = dy g P(g),   dg = dy v Q(g)

``[v, g]`` is the order of GEGLU, ``[g, v]`` that of SwiGLU.
"""

from __future__ import annotations

from fastdiff_kernels.launch import jit, tl


@jit
def glu_backward(  # type: ignore[no-untyped-def]
    du_ptr, sums_ptr, dy_ptr, u_ptr, total, rows, columns, ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of both halves of u for ``rows`` rows of a block of columns of y, and their sums.

    ``ACTIVATION`` is a function of kernels that returns P and Q.
    """
    start = tl.program_id(0).to(tl.int64) * rows
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    stop = tl.minimum(start + rows, total)
    value_sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    gate_sums = value_sums
    to_value, to_gate = (columns, 0) if GATE_FIRST else (0, columns)
    for first in range(start, stop, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        inside = (row < stop)[:, None] & (column < columns)[None, :]
        at = row[:, None] * columns + column[None, :]
        half_at = row[:, None] * (2 * columns) + column[None, :]
        up = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(u_ptr + to_value + half_at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(u_ptr + to_gate + half_at, mask=inside, other=0.0).to(tl.float32)
        share, slope = ACTIVATION(gate)
        value_gradient = up * gate * share
        gate_gradient = up * value * slope
        tl.store(du_ptr + to_value + half_at, value_gradient.to(du_ptr.dtype.element_ty), mask=inside)
        tl.store(du_ptr + to_gate + half_at, gate_gradient.to(du_ptr.dtype.element_ty), mask=inside)
        value_sums += value_gradient
        gate_sums += gate_gradient
    out_ptr = sums_ptr + tl.program_id(0).to(tl.int64) * (2 * columns) + column
    tl.store(out_ptr + to_value, tl.sum(value_sums, axis=0), mask=column < columns)
    tl.store(out_ptr + to_gate, tl.sum(gate_sums, axis=0), mask=column < columns)
