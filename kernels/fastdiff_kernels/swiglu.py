"""SwiGLU behind a linear layer; its backward pass also sums the gradient of the layer's bias.

For ``u = [g, v]`` (Shazeer 2020, arXiv:2002.05202, eq. 6), ``s = sigmoid(g)``::

    y = v g s,   dg = dy v (s + g s (1 - s)),   dv = dy g s

See ``bias_gradient.py`` for ``bias`` and its sums.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.bias_gradient import validate, with_gradient
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.names import Backend


def swiglu_reference(u: Tensor, bias: Tensor | None = None) -> Tensor:
    """``swiglu`` in plain torch, differentiable, in any floating dtype."""
    gate, value = with_gradient(u, bias).chunk(2, dim=-1)
    return F.silu(gate) * value


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
    out: Tensor = plain(swiglu_reference, chosen)(u, bias)
    return out
