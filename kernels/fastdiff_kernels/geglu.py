"""GEGLU behind a linear layer; its backward pass also sums the gradient of the layer's bias.

For ``u = [v, g]`` (Shazeer 2020, arXiv:2002.05202, eq. 6), ``P`` the cumulative distribution function of the normal
distribution and ``p`` its density::

    y = v g P(g),   dv = dy g P(g),   dg = dy v (P(g) + g p(g))

See ``bias_gradient.py`` for ``bias`` and its sums.

Bytes moved per element of y in 16 bits, backward: 10 + 16 / R, where R is the number of rows that one program works
through; the least are 10, Inductor moves 14 and evaluates P twice. One exponential makes both p and P: for negative g,
P is p times a polynomial of ``t = 1 / (1 - b g)``, as in Abramowitz & Stegun 1964, eq. 7.1.26, here of degree 8. It was
fitted to an error below 2e-9 of P, and below 1e-5 of P relatively where P > 1e-17. The forward pass is plain torch, in
compiled code one kernel that its bytes bound.

It runs wherever ``group_norm`` runs by its kernels, by the same choice (``dispatch.choose``): both belong to the UNet.

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

_HALF_LOG2_E = constant(0.5 * 1.4426950408889634)
_DENSITY = constant((2 * torch.pi) ** -0.5)
_MILLS_SCALE = constant(0.55 * 0.5**0.5)
_MILLS = tuple(
    constant(c)
    for c in (
        0.3889587843079045, 0.385513116045396, 0.3687742855967907, 0.018715494013244682, 0.5821066881917925,
        -0.8316153877844812, 0.4176033113407296, -0.07674215125599977,
    )
)  # fmt: skip
"""Coefficients of P(-a) / p(a) = t (c0 + c1 t + ...), t = 1 / (1 + _MILLS_SCALE a), for a >= 0."""
_M0, _M1, _M2, _M3, _M4, _M5, _M6, _M7 = _MILLS


def geglu_reference(u: Tensor, bias: Tensor | None = None) -> Tensor:
    """``geglu`` in plain torch, differentiable, in any floating dtype."""
    value, gate = with_gradient(u, bias).chunk(2, dim=-1)
    return value * F.gelu(gate)


@jit
def _normal(g):  # type: ignore[no-untyped-def]
    """Distribution function and density of the normal distribution."""
    density = tl.exp2(-g * g * _HALF_LOG2_E) * _DENSITY
    t = 1 / (1 + tl.abs(g) * _MILLS_SCALE)
    ratio = t * (_M0 + t * (_M1 + t * (_M2 + t * (_M3 + t * (_M4 + t * (_M5 + t * (_M6 + t * _M7)))))))
    tail = density * ratio
    return tl.where(g < 0, tail, 1 - tail), density


@jit
def _gelu(g):  # type: ignore[no-untyped-def]
    """P of GELU and its derivative, see ``glu.py``."""
    share, density = _normal(g)
    return share, share + g * density


@jit
def geglu_backward_kernel(  # type: ignore[no-untyped-def]
    du_ptr, sums_ptr, dy_ptr, u_ptr, total, rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """See ``glu_backward``."""
    glu_backward(du_ptr, sums_ptr, dy_ptr, u_ptr, total, rows, columns, _gelu, False, BLOCK_R, BLOCK_C)


@torch.library.custom_op("fastdiff::geglu_backward", mutates_args=())
def _geglu_backward(dy: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``u [..., 2 C]`` and of the bias ``[2 C]``."""
    return differentiate(geglu_backward_kernel, dy, u, u.shape[-1] // 2)


_geglu_backward.register_fake(gradients)


def geglu(u: Tensor, bias: Tensor | None = None, *, backend: Backend | None = None) -> Tensor:
    """The first half of ``u`` times GELU of the second; the gradient of ``u``, summed over rows, is that of ``bias``.

    Args:
        u: ``[..., 2 C]`` fp32, bf16 or fp16; the reference takes any floating dtype.
        bias: ``[2 C]``, contained in ``u`` already; of its dtype and device. None: no gradient of a bias is asked for.
        backend: implementation; None: that of ``group_norm``.

    Returns:
        ``[..., C]`` in the dtype of ``u``.

    Raises:
        ValueError: a wrong shape, dtype or device, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = choose("group_norm", u, backend)
    if u.shape[-1] % 2:
        raise ValueError(f"u has shape {tuple(u.shape)}, expected an even last axis: values, then gates")
    validate(chosen == "triton", u, bias, u.shape[-1])
    out: Tensor = (
        summed(u, bias, geglu_reference, _geglu_backward)
        if chosen == "triton"
        else plain(geglu_reference, chosen)(u, bias)
    )
    return out
