"""adaLN: layer norm with shift and scale from a condition, alone or fused with the residual stream, and the gate.

With one shift, scale and gate per sample and channel (Peebles & Xie 2023, "Scalable Diffusion Models with
Transformers", section 3.2; layer norm: Ba et al. 2016, without affine parameters; RMSNorm: Zhang & Sennrich 2019,
arXiv:1910.07467, with a weight or without)::

    y = normed(h) * (1 + scale) + shift
    layer norm:  normed(h) = (h - mean) * rstd,    rstd = 1 / sqrt(var + eps)
    RMSNorm:     normed(h) = h * rstd * weight,    rstd = 1 / sqrt(mean(h^2) + eps)

    modulated_norm            h = x                        returns y
    residual_modulated_norm   h = x                        returns h, y
    gated_modulated_norm      h = x + gate * branch        returns h, y      (or branch + bias)
    gated_residual            h = x + gate * branch        returns h         (or branch + bias)

Gradient, with g = dy * (1 + scale), means over the channels of a token and sums over the tokens of a sample::

    dx = dh + rstd * (g - mean(g) - normed * mean(g * normed)),   dbranch = gate * dx
    dshift = sum(dy),   dscale = sum(dy * normed),   dgate = sum(branch * dx),   dbias = sum(gate * dx) over all samples

For RMSNorm, with n = h * rstd and g = dy * (1 + scale) * weight::

    dx = dh + rstd * (g - n * mean(g * n)),   dscale = weight * sum(dy * n)
    dweight = sum((1 + scale) * dy * n) over all samples

All of it is fp32 in 16 bits, too, rounded once at the end. Published code rounds earlier, LightningDiT before the
weight and RiT behind it, 0.3 % apart.

Bytes moved per element of ``x`` in 16 bits, and 8 / D each way for the statistics (RMSNorm: 4 / D), beside the least
possible and the bytes of Inductor's kernels (residual: with the addition of dh fused)::

                forward      backward       least      Inductor
    modulated   4 + 4 / R    6 + 18 / R     4 / 6      4.02 / 10.04
    residual    4 + 4 / R    8 + 18 / R     4 / 8      4.02 / 12.05
    gated       8 + 6 / R    12 + 28 / R    8 / 12     8.03 / 18.05
    with bias   8 + 8 / R    12 + 38 / R    8 / 12     8.03 / 20.08
    gate        plain torch  6 + 10 / R     6 / 6      6.03 / 6.03
    with bias   plain torch  6 + 20 / R     6 / 6      6.03 / 6.05
    a weight adds    2 / R        14 / R

R is the number of tokens that one program handles: 43 to 86 for 64 or 256 samples of 256 x 1152 on an H200, never below
9 unless a sample is shorter. The terms divided by R, modulations and the partial sums of their gradients (fp32), fit in
the L2 cache. The gated backward recomputes ``h`` from ``x`` and ``branch``, which are stored anyway.

The kernels read the next rows while they work on one: asynchronous copies to shared memory. Inductor's forward moves
as few bytes but has three times the instructions, which take longer than the bytes do on an H200.

Limits: the kernels take fp32, bf16 and fp16, all tensors alike, and up to 4096 channels.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.adaln import launches
from fastdiff_kernels.adaln.modulation import Modulation
from fastdiff_kernels.adaln.plan import MAX_WIDTH, backward_plan, forward_plan, gate_plan
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.names import Backend

__all__ = [
    "Modulation",
    "Norm",
    "gated_modulated_norm",
    "gated_residual",
    "modulated_norm",
    "norm_gradients",
    "residual_modulated_norm",
]


Norm = Literal["layer", "rms"]
"""Layer norm, or RMSNorm."""


def modulate(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``tokens * (1 + scale) + shift``; ``tokens [B, T, D]``, one shift and scale ``[B, D]`` per sample."""
    return tokens * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def modulated_norm_reference(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, weight: Tensor | None = None, norm: Norm = "layer"
) -> Tensor:
    """``modulated_norm`` in plain torch, differentiable, in any floating dtype."""
    if norm == "rms":
        return modulate(F.rms_norm(x, x.shape[-1:], weight, eps), shift, scale)
    return modulate(F.layer_norm(x, x.shape[-1:], eps=eps), shift, scale)


def gated_modulated_norm_reference(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, bias: Tensor | None = None,
    eps: float = 1e-6, weight: Tensor | None = None, norm: Norm = "layer",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``gated_modulated_norm`` in plain torch, differentiable, in any floating dtype."""
    h = x + gate.unsqueeze(1) * (branch if bias is None else branch + bias)
    return h, modulated_norm_reference(h, shift, scale, eps, weight, norm)


def gated_residual_reference(x: Tensor, branch: Tensor, gate: Tensor, bias: Tensor | None = None) -> Tensor:
    """``gated_residual`` in plain torch, differentiable, in any floating dtype."""
    return x + gate.unsqueeze(1) * (branch if bias is None else branch + bias)


@torch.library.custom_op("fastdiff::adaln_forward", mutates_args=())
def _adaln_triton(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor | None, packed: Tensor, part: int, rms: bool,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """``[y, rstd, mean]``, for a gated pair ``[y, rstd, mean, h]``; ``rms``: without ``mean``.

    Statistics are ``[B, T]`` fp32. ``packed`` is the modulation ``[B, K * D]``, its first part for this op ``part``:
    for a gated pair gate, shift, scale, otherwise shift, scale.
    """
    outputs: list[Tensor] = _empty(x, branch, bias, weight, packed, part, rms, eps)
    y, rstd, *others = outputs
    mean, h = None if rms else others[0], None if branch is None else others[-1]
    plan = forward_plan(x, branch is not None, bias is not None)
    launches.norm_forward(launches.Target(y), h, mean, rstd, x, branch, bias, weight, packed, part, eps, plan)
    return outputs


@_adaln_triton.register_fake
def _empty(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor | None, packed: Tensor, part: int, rms: bool,
    eps: float,
) -> list[Tensor]:  # fmt: skip
    statistics = [x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(1 if rms else 2)]
    return [x.new_empty(x.shape), *statistics, *([] if branch is None else [x.new_empty(x.shape)])]


@torch.library.custom_op("fastdiff::adaln_backward", mutates_args=())
def _adaln_backward_triton(
    later: Tensor | None, dy: Tensor, dh: Tensor | None, x: Tensor, branch: Tensor | None, bias: Tensor | None,
    weight: Tensor | None, packed: Tensor, part: int, mean: Tensor | None, rstd: Tensor,
) -> list[Tensor]:  # fmt: skip
    """``[dpacked, dx]``, then ``dbranch``, ``dbias`` and ``dweight`` of those that there are; no mean: RMSNorm.

    ``dpacked`` is the gradient of the whole modulation: that of this op's parts and ``later``, that by the ops that
    took their parts later; None: by no op.
    """
    outputs: list[Tensor] = _empty_gradients(later, dy, dh, x, branch, bias, weight, packed, part, mean, rstd)
    dpacked, dx, dbranch, dbias, dweight = _by_name(outputs, branch, bias, weight)
    plan = backward_plan(x, dh is not None, branch is not None, bias is not None)
    launches.norm_backward(
        launches.Target(dbranch), dx, dpacked, dbias, dweight, later, dy, dh, x, branch, bias, weight, packed, part,
        mean, rstd, plan,
    )  # fmt: skip
    return outputs


@_adaln_backward_triton.register_fake
def _empty_gradients(
    later: Tensor | None, dy: Tensor, dh: Tensor | None, x: Tensor, branch: Tensor | None, bias: Tensor | None,
    weight: Tensor | None, packed: Tensor, part: int, mean: Tensor | None, rstd: Tensor,
) -> list[Tensor]:  # fmt: skip
    weights = [] if weight is None else [x.new_empty(weight.shape)]
    return [packed.new_empty(packed.shape), x.new_empty(x.shape), *_empty_branch(x, branch, bias), *weights]


def _by_name(
    gradients: list[Tensor], branch: Tensor | None, bias: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """``dpacked`` and ``dx``, then the gradients of the other arguments, None for one that is not there."""
    dpacked, dx, *others = gradients
    left = iter(others)
    dbranch, dbias, dweight = (None if argument is None else next(left) for argument in (branch, bias, weight))
    return dpacked, dx, dbranch, dbias, dweight


def norm_gradients(
    dy: Tensor, dh: Tensor, x: Tensor, modulation: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``residual_modulated_norm`` by the kernel, for code that differentiates by itself.

    Args:
        dy: gradient of the norm, ``[B, T, D]``.
        dh: gradient of the stream that passes by, likewise.
        x: as given to the norm, fp32, bf16 or fp16.
        modulation: shift and scale, ``[B, 2D]``; rows of any stride.
        mean: of each token, fp32 ``[B, T]``.
        rstd: reciprocal standard deviation of each token, likewise.

    Returns:
        The gradients of ``x`` and of ``modulation``.
    """
    dmodulation, dx = _adaln_backward_triton(None, dy, dh, x, None, None, None, modulation, 0, mean, rstd)
    return dx, dmodulation


@torch.library.custom_op("fastdiff::gate_backward", mutates_args=())
def _gate_backward_triton(
    later: Tensor | None, dh: Tensor, branch: Tensor, bias: Tensor | None, packed: Tensor, part: int
) -> list[Tensor]:
    """``[dpacked, dbranch]``, with a bias ``[dpacked, dbranch, dbias]``; see ``_adaln_backward_triton``."""
    outputs: list[Tensor] = _empty_gate_gradients(later, dh, branch, bias, packed, part)
    dpacked, dbranch = outputs[:2]
    dbias = outputs[2] if bias is not None else None
    launches.gate_backward(
        launches.Target(dbranch), dpacked, dbias, later, dh, branch, bias, packed, part, gate_plan(dh)
    )
    return outputs


@_gate_backward_triton.register_fake
def _empty_gate_gradients(
    later: Tensor | None, dh: Tensor, branch: Tensor, bias: Tensor | None, packed: Tensor, part: int
) -> list[Tensor]:
    return [packed.new_empty(packed.shape), *_empty_branch(dh, branch, bias)]


def _empty_branch(x: Tensor, branch: Tensor | None, bias: Tensor | None) -> list[Tensor]:
    """Memory for the gradients of the branch and of the bias, as far as there are any."""
    gated = [] if branch is None else [x.new_empty(x.shape)]
    return gated if bias is None else [*gated, x.new_empty(bias.shape)]


class _AdaLN(torch.autograd.Function):
    """``y``; for a pair ``h, y``, and ``packed`` for the next op."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor | None, packed: Tensor,
        part: int, rms: bool, eps: float, pair: bool,
    ) -> Any:  # fmt: skip
        y, rstd, *others = _adaln_triton(x, branch, bias, weight, packed, part, rms, eps)
        ctx.save_for_backward(x, branch, bias, weight, packed, None if rms else others[0], rstd)
        ctx.part = part
        return (x.view_as(x) if branch is None else others[-1], y, packed.view_as(packed)) if pair else y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        dh, dy, later = upstream if len(upstream) == 3 else (None, upstream[0], None)
        x, branch, bias, weight, packed, *statistics = ctx.saved_tensors
        gradients = _adaln_backward_triton(later, dy, dh, x, branch, bias, weight, packed, ctx.part, *statistics)
        dpacked, dx, dbranch, dbias, dweight = _by_name(gradients, branch, bias, weight)
        return dx, dbranch, dbias, dweight, dpacked, None, None, None, None


class _Gate(torch.autograd.Function):
    """``x + gate * (branch + bias)``, in plain torch: only the backward is a kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, bias: Tensor | None, packed: Tensor, part: int) -> Tensor:
        ctx.save_for_backward(branch, bias, packed)
        ctx.part = part
        gate = packed.narrow(1, part * x.shape[2], x.shape[2])
        h = torch.addcmul(x, gate.unsqueeze(1), branch)
        return h if bias is None else h + (gate * bias).unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (dh,) = upstream
        gradients = _gate_backward_triton(None, dh, *ctx.saved_tensors, ctx.part)
        dpacked, dbranch, dbias = (*gradients, None)[:3]
        return dh, dbranch, dbias, dpacked, None


def modulated_norm(
    x: Tensor, modulation: Modulation, *, weight: Tensor | None = None, norm: Norm = "layer", eps: float = 1e-6,
    backend: Backend | None = None,
) -> Tensor:  # fmt: skip
    """``normed(x) * (1 + scale) + shift``.

    Args:
        x: ``[B, T, D]`` fp32, bf16 or fp16, D at most 4096; the reference takes any floating dtype and D.
        modulation: its next parts are shift and scale; dtype and device of ``x``. They are its last: it does not pass
            the modulation on.
        weight: that of RMSNorm, ``[D]``, dtype and device of ``x``; None: it has none, as layer norm here.
        norm: "layer", or "rms" (RMSNorm).
        eps: added to the variance, or to the mean square.
        backend: implementation; None: the default of ``dispatch.choose``.

    Returns:
        ``[B, T, D]``, contiguous by the kernel, in the dtype of ``x``.

    Raises:
        ValueError: a wrong shape, dtype or device, a weight of layer norm, or no such norm or backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = choose("adaln", x, backend)
    _validate(chosen == "triton", x, modulation, 2, norm, weight=weight)
    if chosen == "triton":
        packed = modulation.packed
        y: Tensor = _AdaLN.apply(  # type: ignore[no-untyped-call]
            x, None, None, weight, packed, modulation.advance(2), norm == "rms", eps, False
        )
    else:
        y = _plain_norm(x, modulation, weight, norm, eps, chosen)
    modulation.end()
    return y


def _plain_norm(
    x: Tensor, modulation: Modulation, weight: Tensor | None, norm: Norm, eps: float, backend: Backend
) -> Tensor:
    parts = modulation.take(2, x.shape[2])
    y: Tensor = plain(modulated_norm_reference, backend)(x, *parts, eps, weight, norm)
    return y


def residual_modulated_norm(
    x: Tensor, modulation: Modulation, *, weight: Tensor | None = None, norm: Norm = "layer", eps: float = 1e-6,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``x`` itself and ``modulated_norm(x, modulation)``, for a residual stream that passes by the norm.

    Continue with the returned ``x``: the backward kernel then adds the gradient of the stream, which otherwise takes
    another pass. Arguments and errors as for ``modulated_norm``; the modulation is passed on.
    """
    chosen = choose("adaln", x, backend)
    _validate(chosen == "triton", x, modulation, 2, norm, weight=weight)
    if chosen != "triton":
        return x, _plain_norm(x, modulation, weight, norm, eps, chosen)
    return _pair(x, None, None, weight, modulation, 2, norm, eps)


def gated_modulated_norm(
    x: Tensor, branch: Tensor, modulation: Modulation, *, bias: Tensor | None = None, weight: Tensor | None = None,
    norm: Norm = "layer", eps: float = 1e-6, backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``h = x + gate * (branch + bias)`` and ``modulated_norm(h)``, each ``[B, T, D]``, in the dtype of ``x``.

    Arguments and errors as for ``modulated_norm``. ``branch`` has the shape of ``x``. The next parts of ``modulation``
    are gate, shift and scale; it is passed on. ``bias`` ``[D]``, or None, is that of the linear layer before; its
    gradient then takes no pass of its own.
    """
    chosen = choose("adaln", x, backend)
    _validate(chosen == "triton", x, modulation, 3, norm, branch=branch, bias=bias, weight=weight)
    if chosen == "triton":
        return _pair(x, branch, bias, weight, modulation, 3, norm, eps)
    gate, shift, scale = modulation.take(3, x.shape[2])
    pair: tuple[Tensor, Tensor] = plain(gated_modulated_norm_reference, chosen)(
        x, branch, gate, shift, scale, bias, eps, weight, norm
    )
    return pair


def gated_residual(
    x: Tensor, branch: Tensor, modulation: Modulation, *, bias: Tensor | None = None, backend: Backend | None = None
) -> Tensor:
    """``x + gate * (branch + bias)``, ``[B, T, D]``, in the dtype of ``x``.

    Arguments and errors as for ``gated_modulated_norm``. The next part of ``modulation`` is the gate, and its last: it
    is not passed on.
    """
    chosen = choose("adaln", x, backend)
    _validate(chosen == "triton", x, modulation, 1, "layer", branch=branch, bias=bias)
    if chosen == "triton":
        h: Tensor = _Gate.apply(x, branch, bias, modulation.packed, modulation.advance(1))  # type: ignore[no-untyped-call]
    else:
        h = plain(gated_residual_reference, chosen)(x, branch, *modulation.take(1, x.shape[2]), bias)
    modulation.end()
    return h


def _pair(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor | None, modulation: Modulation, parts: int,
    norm: Norm, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    packed = modulation.packed
    h, y, packed = _AdaLN.apply(  # type: ignore[no-untyped-call]
        x, branch, bias, weight, packed, modulation.advance(parts), norm == "rms", eps, True
    )
    modulation.passed_on(packed)
    return h, y


def _validate(kernel: bool, x: Tensor, modulation: Modulation, parts: int, norm: Norm, **others: Tensor | None) -> None:
    """Refuse arguments of an op that takes the next ``parts`` of ``modulation``."""
    if norm not in get_args(Norm):
        raise ValueError(f"norm {norm!r}: expected 'layer' or 'rms'")
    if norm == "layer" and others.get("weight") is not None:
        raise ValueError("a weight is given with norm 'layer', which has none here; expected norm 'rms'")
    if x.dim() != 3 or x.shape[2] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [B, T, D] with D > 0")
    if kernel and x.shape[2] > MAX_WIDTH:
        raise ValueError(f"x has {x.shape[2]} channels, expected at most {MAX_WIDTH}; use backend 'reference'")
    if kernel and x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}, expected float32, bfloat16 or float16; use backend 'reference'")
    batch, _, width = x.shape
    packed = modulation.packed
    if packed.dim() != 2 or packed.shape[0] != batch or packed.shape[1] % width:
        raise ValueError(
            f"modulation has shape {tuple(packed.shape)}, expected ({batch}, K * {width}) as x is {tuple(x.shape)}"
        )
    if (left := modulation.left(width)) < parts:
        raise ValueError(
            f"modulation has {max(left, 0)} of {packed.shape[1] // width} parts left, expected {parts} or more"
        )
    for name, tensor in {"modulation": packed, **others}.items():
        if tensor is None:
            continue
        expected = {"branch": tuple(x.shape), "bias": (width,), "weight": (width,)}.get(name, tuple(tensor.shape))
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected} as x is {tuple(x.shape)}")
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, expected that of x, {x.dtype} on {x.device}; "
                f"use {name}.to(x)"
            )
