"""The tanh form of GELU behind a linear layer; its backward pass also sums the gradient of the layer's bias.

With ``s = sigmoid(2 z)``, ``z = sqrt(2 / pi) (u + 0.044715 u^3)`` (Hendrycks & Gimpel 2016, arXiv:1606.08415, section
2)::

    y = u s,   du = dy (s + 2 z' u s (1 - s))

See ``bias_gradient.py`` for ``bias`` and its sums.

Bytes moved per element of u in 16 bits, backward: 6 + 8 / R, where R is the number of rows that one program works
through; the least are 6, Inductor moves 8.03. One exponential and one division per element make both s and 1 - s; the
exponential is of a negative number, so that neither overflows. The forward pass is plain torch.

It runs wherever ``adaln`` runs by its kernels, by the same choice (``dispatch.choose``): both belong to the DiT.

Limits: fp32, bf16 and fp16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.bias_gradient import differentiate, gradients, store_sums, summed, validate, with_gradient
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import constant, jit, tl
from fastdiff_kernels.names import Backend

_SCALE = 2 * (2 / torch.pi) ** 0.5  # 2 z = _SCALE (u + _CUBIC u^3)
_CUBIC = 0.044715
_LINEAR_SLOPE, _CUBIC_SLOPE = constant(_SCALE), constant(3 * _SCALE * _CUBIC)
_LOG2_E = 1.4426950408889634
_LINEAR_LOG2, _CUBIC_LOG2 = constant(_LOG2_E * _SCALE), constant(_LOG2_E * _SCALE * _CUBIC)


def gelu_reference(u: Tensor, bias: Tensor | None = None) -> Tensor:
    """``gelu`` in plain torch, differentiable, in any floating dtype."""
    return F.gelu(with_gradient(u, bias), approximate="tanh")


@jit
def _shares(u):  # type: ignore[no-untyped-def]
    """The smaller and the larger of s and 1 - s; s is the smaller for negative u."""
    small = tl.exp2(-tl.abs(u * (_LINEAR_LOG2 + u * u * _CUBIC_LOG2)))  # in [0, 1]
    larger = 1 / (1 + small)
    return small * larger, larger


@jit
def curve(u):  # type: ignore[no-untyped-def]
    """GELU of fp32 numbers."""
    smaller, larger = _shares(u)
    return u * tl.where(u < 0, smaller, larger)


@jit
def slope(u):  # type: ignore[no-untyped-def]
    """Derivative of GELU, 0 and 1 far from 0."""
    smaller, larger = _shares(u)
    # The smaller is 0 long before the cube is infinite, from 1e19 on: the product is NaN there, as in torch.
    return tl.where(u < 0, smaller, larger) + u * smaller * larger * (_LINEAR_SLOPE + u * u * _CUBIC_SLOPE)


@jit
def gelu_backward_kernel(  # type: ignore[no-untyped-def]
    du_ptr, sums_ptr, dy_ptr, u_ptr, total, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Gradient of u for ``rows`` rows of a block of columns, and its sums."""
    start = tl.program_id(0).to(tl.int64) * rows
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    stop = tl.minimum(start + rows, total)
    sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(start, stop, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        at = row[:, None] * columns + column[None, :]
        inside = (row < stop)[:, None] & (column < columns)[None, :]
        u = tl.load(u_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        du = up * slope(u)
        tl.store(du_ptr + at, du.to(du_ptr.dtype.element_ty), mask=inside)
        sums += du
    store_sums(sums_ptr, sums, column, columns)


@torch.library.custom_op("fastdiff::gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``u [..., C]`` and of the bias ``[C]``."""
    return differentiate(gelu_backward_kernel, dy, u, u.shape[-1])


_gelu_backward.register_fake(gradients)


def _forward(u: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        return F.gelu(u, approximate="tanh")
    # Inductor writes tanh as a call of libdevice with a branch, in more than twice the instructions of the sigmoid.
    wide = u.float()
    return (wide * torch.sigmoid(wide * (_SCALE + wide * wide * (_SCALE * _CUBIC)))).to(u.dtype)


def gelu(u: Tensor, bias: Tensor | None = None, *, backend: Backend | None = None) -> Tensor:
    """The tanh form of GELU of ``u``; the gradient of ``u`` is also that of ``bias``, summed over rows.

    Args:
        u: ``[..., C]`` fp32, bf16 or fp16; the reference takes any floating dtype.
        bias: ``[C]``, contained in ``u`` already; of its dtype and device. None: no gradient of a bias is asked for.
        backend: implementation; None: that of ``adaln``.

    Returns:
        ``[..., C]`` in the dtype of ``u``.

    Raises:
        ValueError: a wrong shape, dtype or device, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = choose("adaln", u, backend)
    validate(chosen == "triton", u, bias, u.shape[-1])
    out: Tensor = (
        summed(u, bias, _forward, _gelu_backward) if chosen == "triton" else plain(gelu_reference, chosen)(u, bias)
    )
    return out
