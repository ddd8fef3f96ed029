"""The ops of ``adaln`` whose output, or gradient of the branch, is an operand of FP8 products; see there for formulas.

    norm            y = normed(x) * (1 + scale) + shift                              y
    gated_norm      h = x + gate * (branch + bias),  y of h                           y
    gated_norm_backward                                                              dbranch
    gate_backward   of out = h + gate * (branch + bias): dbranch = gate * dout        dbranch

The operand, in the last column, has one row per token: ``[B * T, D]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff_kernels.adaln import _adaln_backward_triton as adaln_backward
from fastdiff_kernels.dispatch import choose
from fastdiff_kernels.fp8.values import Form, Quantised, quantise


class Normed(NamedTuple):
    """Output of a norm."""

    y: Quantised
    """``[B * T, D]``."""
    mean: Tensor
    """fp32 ``[B, T]``."""
    rstd: Tensor
    """fp32 ``[B, T]``."""
    h: Tensor
    """``[B, T, D]``, what was normalised."""


class BranchGradients(NamedTuple):
    """Gradients of a gated branch and of all else that its op takes."""

    dbranch: Quantised
    """``[B * T, D]``."""
    dbias: Tensor
    """``[D]``."""
    modulations: Tensor
    """``[K, B, D]``: of the gate alone; of a gated norm those of shift, scale and gate."""
    dx: Tensor | None
    """``[B, T, D]``; None: that of the gate alone, whose residual stream passes by."""


def norm_reference(x: Tensor, shift: Tensor, scale: Tensor, eps: float, unit: Tensor, form: Form) -> Normed:
    """``norm`` in plain torch."""
    normed, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, eps)
    y = normed * (1 + scale.float().unsqueeze(1)) + shift.float().unsqueeze(1)
    return Normed(quantise(y.flatten(0, 1), unit, form, x.dtype), mean.squeeze(-1), rstd.squeeze(-1), x)


def norm(x: Tensor, shift: Tensor, scale: Tensor, eps: float, unit: Tensor, form: Form) -> Normed:
    """``layer_norm(x) * (1 + scale) + shift`` as an operand.

    Args:
        x: ``[B, T, D]``.
        shift: ``[B, D]``, rows of any stride.
        scale: likewise.
        eps: added to the variance.
        unit: scale of the operand, fp32 ``[]``.
        form: of the operand.
    """
    return norm_reference(x, shift, scale, eps, unit, form)


def gated_norm_reference(
    x: Tensor, branch: Tensor, bias: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float, unit: Tensor,
    form: Form,
) -> Normed:  # fmt: skip
    """``gated_norm`` in plain torch."""
    h = (x.float() + gate.float().unsqueeze(1) * (branch.float() + bias.float())).to(x.dtype)
    return norm_reference(h, shift, scale, eps, unit, form)


def gated_norm(
    x: Tensor, branch: Tensor, bias: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float, unit: Tensor,
    form: Form,
) -> Normed:  # fmt: skip
    """``norm`` of ``h = x + gate * (branch + bias)``; ``branch`` as ``x``, ``bias [D]``, ``gate`` as ``shift``."""
    return gated_norm_reference(x, branch, bias, gate, shift, scale, eps, unit, form)


def norm_backward_reference(
    dy: Tensor, dh: Tensor, x: Tensor, modulation: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """``norm_backward`` in plain torch."""
    _, scale = modulation.chunk(2, dim=1)
    up = dy.float()
    normed = (x.float() - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    g = up * (1 + scale.float().unsqueeze(1))
    inner = g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)
    dx = dh.float() + rstd.unsqueeze(-1) * inner
    return dx.to(x.dtype), torch.cat([up.sum(1), (up * normed).sum(1)], dim=1).to(x.dtype)


def norm_backward(
    dy: Tensor, dh: Tensor, x: Tensor, modulation: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``norm``, none of them an operand: ``dx [B, T, D]``, and that of ``modulation``.

    ``modulation [B, 2D]`` is shift and scale side by side. ``dy`` is the gradient of the output, ``dh`` that of the
    residual stream beside, ``[B, T, D]`` each.
    """
    if choose("adaln", x) != "triton":
        return norm_backward_reference(dy, dh, x, modulation, mean, rstd)
    dmodulation, dx = adaln_backward(None, dy, dh, x, None, None, modulation, 0, mean, rstd)
    return dx, dmodulation


def gated_norm_backward_reference(
    dy: Tensor, dh: Tensor, x: Tensor, branch: Tensor, bias: Tensor, gate: Tensor, scale: Tensor, mean: Tensor,
    rstd: Tensor, unit: Tensor, form: Form,
) -> BranchGradients:  # fmt: skip
    """``gated_norm_backward`` in plain torch."""
    dy, branch = dy.float(), branch.float() + bias.float()
    gate = gate.float().unsqueeze(1)
    h = (x.float() + gate * branch).to(x.dtype).float()
    normed = (h - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    g = dy * (1 + scale.float().unsqueeze(1))
    inner = g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)
    dx = dh.float() + rstd.unsqueeze(-1) * inner
    dbranch = (gate * dx).flatten(0, 1)
    modulations = torch.stack([dy.sum(1), (dy * normed).sum(1), (branch * dx).sum(1)]).to(x.dtype)
    dbias = dbranch.sum(0).to(x.dtype)
    return BranchGradients(quantise(dbranch, unit, form, x.dtype), dbias, modulations, dx.to(x.dtype))


def gated_norm_backward(
    dy: Tensor, dh: Tensor, x: Tensor, branch: Tensor, bias: Tensor, gate: Tensor, scale: Tensor, mean: Tensor,
    rstd: Tensor, unit: Tensor, form: Form,
) -> BranchGradients:  # fmt: skip
    """Gradients of ``gated_norm``, for ``dy`` of its operand and ``dh`` of the residual stream, ``[B, T, D]`` each."""
    return gated_norm_backward_reference(dy, dh, x, branch, bias, gate, scale, mean, rstd, unit, form)


def gate_backward_reference(
    dout: Tensor, branch: Tensor, bias: Tensor, gate: Tensor, unit: Tensor, form: Form
) -> BranchGradients:
    """``gate_backward`` in plain torch."""
    up = dout.float()
    dgate = (up * (branch.float() + bias.float())).sum(1).to(dout.dtype)
    dbranch = (gate.float().unsqueeze(1) * up).flatten(0, 1)
    operand = quantise(dbranch, unit, form, dout.dtype)
    return BranchGradients(operand, dbranch.sum(0).to(dout.dtype), dgate.unsqueeze(0), None)


def gate_backward(
    dout: Tensor, branch: Tensor, bias: Tensor, gate: Tensor, unit: Tensor, form: Form
) -> BranchGradients:
    """Gradients of ``gate * (branch + bias)``.

    For ``dout [B, T, D]``; ``branch`` is alike, ``bias [D]``, ``gate [B, D]``.
    """
    return gate_backward_reference(dout, branch, bias, gate, unit, form)
