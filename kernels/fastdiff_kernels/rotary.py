"""Rotary position embedding of queries and keys, with their norm, on a packed projection; its bias's gradient, too.

A head of a query or key, of d channels, is divided by its root mean square and multiplied by a weight (RMSNorm: Zhang &
Sennrich 2019, arXiv:1910.07467; of queries and keys: Henry et al. 2020, arXiv:2010.04245); then its neighbouring pairs
of channels are rotated by the angles of its token (Su et al. 2021, arXiv:2104.09864, eq. 34)::

    n = x / sqrt(mean(x^2) + eps),   m = n * weight,   (y0, y1) = (m0 cos - m1 sin, m1 cos + m0 sin)

Values stay as they are. Either part may be absent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.bias_gradient import validate, with_gradient
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.names import Backend


class Rotary(NamedTuple):
    """Arguments of ``rotated`` beside the packed projection, whose heads have d channels."""

    cos: Tensor | None = None
    """Cosines ``[T, d / 2]`` fp32, one for each pair of neighbouring channels; 1 for a token that is not rotated."""
    sin: Tensor | None = None
    """Sines, likewise; 0 for a token that is not rotated. Neither: no rotation."""
    q_weight: Tensor | None = None
    """Weight of the norm of queries ``[d]``, of the dtype of the projection."""
    k_weight: Tensor | None = None
    """Of keys, likewise. Neither: no norm."""
    eps: float = 1e-6
    """Added to the mean square."""


def _turned(x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float) -> Tensor:
    """Norm and rotation of ``x [B, T, H, d]``; products with cosines and sines are fp32 or wider."""
    if weight is not None:
        x = F.rms_norm(x, x.shape[-1:], weight, eps)
    if cos is None or sin is None:
        return x
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, d / 2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).to(x.dtype)


def rotated_parts_reference(
    u: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 1e-6, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``rotated_parts`` in plain torch, differentiable, in any floating dtype."""
    u = with_gradient(u, None if bias is None else bias.view(u.shape[2:]))
    query, key, value = u.unbind(2)
    query, key = _turned(query, q_weight, cos, sin, eps), _turned(key, k_weight, cos, sin, eps)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def rotated_reference(
    u: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 1e-6, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``rotated`` in plain torch, differentiable, in any floating dtype."""
    parts = rotated_parts_reference(u, cos, sin, q_weight, k_weight, eps, bias)
    return torch.stack([part.transpose(1, 2) for part in parts], 2)


def rotated(
    u: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 1e-6, *, bias: Tensor | None = None, backend: Backend | None = None,
) -> Tensor:  # fmt: skip
    """Queries and keys normed per head, then rotated; values as they are.

    Args:
        u: packed projection ``[B, T, 3, H, d]``, fp32, bf16 or fp16, d even; the reference takes any floating dtype.
        cos: see ``Rotary``, and so for sin, the weights and eps.
        sin: see ``cos``.
        q_weight: see ``cos``.
        k_weight: see ``cos``.
        eps: see ``cos``.
        bias: ``[3 * H * d]``, contained in ``u`` already; of its dtype and device. None: no gradient of a bias is asked
            for.
        backend: implementation; None: that of ``adaln``.

    Returns:
        ``[B, T, 3, H, d]`` in the dtype of ``u``, contiguous by the kernel.

    Raises:
        ValueError: a wrong shape, dtype or device, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = choose("adaln", u, backend)
    _validate(chosen == "triton", u, Rotary(cos, sin, q_weight, k_weight, eps), bias)
    out: Tensor = plain(rotated_reference, chosen)(u, cos, sin, q_weight, k_weight, eps, bias)
    return out


def rotated_parts(
    u: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, q_weight: Tensor | None = None,
    k_weight: Tensor | None = None, eps: float = 1e-6, *, bias: Tensor | None = None, backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``rotated`` as queries, keys and values, ``[B, H, T, d]`` each; values are a view of ``u``.

    Arguments and errors as for ``rotated``. Their three gradients are joined to that of ``u`` by the kernel that turns
    them back.
    """
    chosen = choose("adaln", u, backend)
    _validate(chosen == "triton", u, Rotary(cos, sin, q_weight, k_weight, eps), bias)
    query, key, value = plain(rotated_parts_reference, chosen)(u, cos, sin, q_weight, k_weight, eps, bias)
    return query, key, value


def _validate(kernel: bool, u: Tensor, rotary: Rotary, bias: Tensor | None) -> None:
    if u.dim() != 5 or u.shape[2] != 3 or u.shape[4] % 2:
        raise ValueError(f"u has shape {tuple(u.shape)}, expected [B, T, 3, H, d] with d even")
    validate(kernel, u, bias, u.shape[2:].numel())
    cos, sin, q_weight, k_weight, _ = rotary
    for names, pair in (("cos and sin", (cos, sin)), ("q_weight and k_weight", (q_weight, k_weight))):
        if (pair[0] is None) != (pair[1] is None):
            raise ValueError(f"of {names} one is None, expected both or neither")
    if cos is None and q_weight is None:
        raise ValueError("neither angles nor weights are given, expected either or both; see fastdiff_kernels.rotary")
    length, width = u.shape[1], u.shape[4]
    tables = {"cos": cos, "sin": sin}
    for name, tensor in (tables | {"q_weight": q_weight, "k_weight": k_weight}).items():
        if tensor is None:
            continue
        shape = (length, width // 2) if name in tables else (width,)
        dtype = torch.promote_types(torch.float32, u.dtype) if name in tables else u.dtype
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape} as u is {tuple(u.shape)}")
        if tensor.dtype != dtype or tensor.device != u.device:
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, expected {dtype} on {u.device}")
