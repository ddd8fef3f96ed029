"""SwiGLU behind a linear layer; its backward pass also sums the gradient of the layer's bias.

For ``u = [g, v]`` (Shazeer 2020, arXiv:2002.05202, eq. 6), ``s = sigmoid(g)``::

    y = v g s,   dg = dy v (s + g s (1 - s)),   dv = dy g s

See ``bias_gradient.py`` for ``bias`` and its sums, ``glu.py`` for the kernel.

Bytes moved per element of y in 16 bits, backward: 10 + 16 / R, where R is the number of rows that one program works
through; the least are 10, Inductor moves 14. One exponential and one division make both s and 1 - s; the exponential is
of a negative number, so that neither overflows. The forward pass is plain torch.

It runs wherever ``adaln`` runs by its kernels, by the same choice (``dispatch.choose``): both belong to the DiT.

Limits: fp32, bf16 and fp16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.bias_gradient import differentiate, gradients, summed, validate, with_gradient
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.glu import glu_backward
from fastdiff_kernels.launch import constant, jit, tl
from fastdiff_kernels.names import Backend

_LOG2_E = constant(1.4426950408889634)


def swiglu_reference(u: Tensor, bias: Tensor | None = None) -> Tensor:
    """``swiglu`` in plain torch, differentiable, in any floating dtype."""
    gate, value = with_gradient(u, bias).chunk(2, dim=-1)
    return F.silu(gate) * value


@jit
def _silu(g):  # type: ignore[no-untyped-def]
    """P of SiLU, a sigmoid, and its derivative, see ``glu.py``."""
    small = tl.exp2(-tl.abs(g) * _LOG2_E)  # in [0, 1]
    larger = 1 / (1 + small)
    smaller = small * larger
    share = tl.where(g < 0, smaller, larger)
    return share, share + g * (smaller * larger)


@jit
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    du_ptr, sums_ptr, dy_ptr, u_ptr, total, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """See ``glu_backward``."""
    glu_backward(du_ptr, sums_ptr, dy_ptr, u_ptr, total, rows, columns, _silu, True, BLOCK_R, BLOCK_C)


@torch.library.custom_op("fastdiff::swiglu_backward", mutates_args=())
def _swiglu_backward(dy: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``u [..., 2 C]`` and of the bias ``[2 C]``."""
    return differentiate(swiglu_backward_kernel, dy, u, u.shape[-1] // 2)


_swiglu_backward.register_fake(gradients)


def swiglu(u: Tensor, bias: Tensor | None = None, *, backend: Backend | None = None) -> Tensor:
    """SiLU of the first half of ``u`` times the second; the gradient of ``u``, summed over rows, is that of ``bias``.

    Args:
        u: ``[..., 2 C]`` fp32, bf16 or fp16; the reference takes any floating dtype.
        bias: ``[2 C]``, contained in ``u`` already; of its dtype and device. None: no gradient of a bias is asked for.
        backend: implementation; None: that of ``adaln``.

    Returns:
        ``[..., C]`` in the dtype of ``u``.

    Raises:
        ValueError: a wrong shape, dtype or device, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = choose("adaln", u, backend)
    if u.shape[-1] % 2:
        raise ValueError(f"u has shape {tuple(u.shape)}, expected an even last axis: gates, then values")
    validate(chosen == "triton", u, bias, u.shape[-1])
    out: Tensor = (
        summed(u, bias, swiglu_reference, _swiglu_backward)
        if chosen == "triton"
        else plain(swiglu_reference, chosen)(u, bias)
    )
    return out
