"""adaLN: layer norm with shift and scale from a condition, alone or fused with the residual stream.

With one shift, scale and gate per sample and channel (Peebles & Xie 2023, "Scalable Diffusion Models with
Transformers", section 3.2; layer norm: Ba et al. 2016, without affine parameters)::

    y = normed(h) * (1 + scale) + shift,   normed(h) = (h - mean) * rstd,   rstd = 1 / sqrt(var + eps)

    modulated_norm            h = x                        returns y
    residual_modulated_norm   h = x                        returns h, y
    gated_modulated_norm      h = x + gate * branch        returns h, y      (or branch + bias)

Gradient, with g = dy * (1 + scale), means over the channels of a token and sums over the tokens of a sample::

    dx = dh + rstd * (g - mean(g) - normed * mean(g * normed)),   dbranch = gate * dx
    dshift = sum(dy),   dscale = sum(dy * normed),   dgate = sum(branch * dx),   dbias = sum(gate * dx) over all samples

Bytes moved per element of ``x`` in 16 bits, and 8 / D each way for the statistics, beside the least possible and
the bytes of Inductor's kernels (residual: with the addition of dh fused)::

                forward      backward       least      Inductor
    modulated   4 + 4 / R    6 + 18 / R     4 / 6      4.02 / 10.04
    residual    4 + 4 / R    8 + 18 / R     4 / 8      4.02 / 12.05
    gated       8 + 6 / R    12 + 28 / R    8 / 12     8.03 / 18.05
    with bias   8 + 8 / R    12 + 38 / R    8 / 12     8.03 / 20.08

R is the number of tokens that one program handles: 32 for 64 samples of 256 x 1152 on an H200, never below 9 unless a
sample is shorter. The terms divided by R, modulations and the partial sums of their gradients (fp32), fit in the L2
cache. The gated backward recomputes ``h`` from ``x`` and ``branch``, which are stored anyway.

Inductor's forward is already at the limit and fuses with its neighbours, which a custom op would prevent. So in code
that is being compiled only the backward is a kernel, and the forward is plain torch; in eager mode both are kernels.

Limits: the kernels take fp32, bf16 and fp16, all tensors alike, and up to 4096 channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.adaln import kernels
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import processors, run, triton
from fastdiff_kernels.names import Backend

_MAX_WIDTH = 4096
_WARPS_PER_PROCESSOR = 16  # enough loads in flight to reach the bandwidth; more would only add partial sums
_LEAST_ROWS = 16


def modulate(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``tokens * (1 + scale) + shift``; ``tokens [B, T, D]``, one shift and scale ``[B, D]`` per sample."""
    return tokens * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def modulated_norm_reference(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """``modulated_norm`` in plain torch, differentiable, in any floating dtype."""
    return modulate(F.layer_norm(x, x.shape[-1:], eps=eps), shift, scale)


def gated_modulated_norm_reference(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, bias: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``gated_modulated_norm`` in plain torch, differentiable, in any floating dtype."""
    h = x + gate.unsqueeze(1) * (branch if bias is None else branch + bias)
    return h, modulated_norm_reference(h, shift, scale, eps)


def _plan(x: Tensor, gated: bool) -> tuple[int, int, dict[str, Any]]:
    """Tokens per program, programs per sample, and the constants and warps of a kernel."""
    batch, length, width = x.shape
    head = max(int(triton.next_power_of_2(width)) // 2, 1)
    warps = max(head // 256, 1)  # a thread reads 8 columns of the head
    lanes = min(32 * warps, head)
    tail = max(int(triton.next_power_of_2(max(width - head, 1))), lanes)
    # As many programs as keep every processor busy, no more.
    programs = processors(x) * (_WARPS_PER_PROCESSOR // warps)
    blocks = min(max(programs // max(batch, 1), 1), triton.cdiv(length, _LEAST_ROWS))
    rows = triton.cdiv(length, max(blocks, 1))
    constants = {"D": width, "BLOCK_HEAD": head, "BLOCK_TAIL": tail, "LANES": lanes, "GATED": gated, "num_warps": warps}
    return rows, triton.cdiv(length, max(rows, 1)), constants


def _strided(modulation: Tensor | None) -> tuple[Any, int]:
    """A ``[B, D]`` tensor whose rows are contiguous, usually as it is, and the distance between rows."""
    if modulation is None:
        return None, 0
    rows = modulation if modulation.stride(1) == 1 else modulation.contiguous()
    return rows, rows.stride(0)


def _validate(kernel: bool, x: Tensor, shift: Tensor, scale: Tensor, **gated: Tensor) -> None:
    if x.dim() != 3 or x.shape[2] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [B, T, D] with D > 0")
    if kernel and x.shape[2] > _MAX_WIDTH:
        raise ValueError(f"x has {x.shape[2]} channels, expected at most {_MAX_WIDTH}; use backend 'reference'")
    if kernel and x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}, expected float32, bfloat16 or float16; use backend 'reference'")
    for name, tensor in {"shift": shift, "scale": scale, **gated}.items():
        expected = {"branch": tuple(x.shape), "bias": (x.shape[2],)}.get(name, (x.shape[0], x.shape[2]))
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected} as x is {tuple(x.shape)}")
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, expected that of x, {x.dtype} on {x.device}; "
                f"use {name}.to(x)"
            )


@torch.library.custom_op("fastdiff::adaln_forward", mutates_args=())
def _adaln_triton(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, gate: Tensor | None, shift: Tensor, scale: Tensor, eps: float
) -> list[Tensor]:
    """``[y, mean, rstd]``, for a gated pair ``[y, mean, rstd, h]``; statistics are ``[B, T]`` fp32."""
    outputs: list[Tensor] = _empty(x, branch, bias, gate, shift, scale, eps)
    y, mean, rstd, *h = outputs
    rows, blocks, constants = _plan(x, branch is not None)
    branch, bias = (None if t is None else t.contiguous() for t in (branch, bias))
    (gate, gate_stride), (shift, shift_stride) = _strided(gate), _strided(shift)
    scale, scale_stride = _strided(scale)
    run(
        kernels.adaln_fwd_kernel, (x.shape[0] * blocks,),
        y, h[0] if h else None, mean, rstd, x.contiguous(), branch, bias, gate, shift, scale, gate_stride,
        shift_stride, scale_stride, x.shape[1], rows, blocks, eps, **constants,
    )  # fmt: skip
    return outputs


@_adaln_triton.register_fake
def _empty(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, gate: Tensor | None, shift: Tensor, scale: Tensor, eps: float
) -> list[Tensor]:
    mean, rstd = (x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(2))
    return [x.new_empty(x.shape), mean, rstd, *([] if branch is None else [x.new_empty(x.shape)])]


def _four(gradients: list[Tensor]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the outputs of the backward op, with None for those that it has not."""
    dx, modulations, *others = gradients
    return dx, modulations, others[0] if others else None, others[1] if len(others) > 1 else None


@torch.library.custom_op("fastdiff::adaln_backward", mutates_args=())
def _adaln_backward_triton(
    dy: Tensor, dh: Tensor | None, x: Tensor, branch: Tensor | None, bias: Tensor | None, gate: Tensor | None,
    scale: Tensor, mean: Tensor, rstd: Tensor,
) -> list[Tensor]:  # fmt: skip
    """``[dx, modulations]``, for a gated pair ``[dx, modulations, dbranch]``, with a bias also ``dbias``.

    ``modulations`` is ``[K, B, D]``: the gradients of shift and scale, for a gated pair also of the gate. ``dbias`` is
    ``[B, D]`` fp32, one row per sample.
    """
    outputs: list[Tensor] = _empty_gradients(dy, dh, x, branch, bias, gate, scale, mean, rstd)
    dx, modulations, dbranch, dbias = _four(outputs)
    batch, length, width = x.shape
    rows, blocks, constants = _plan(x, branch is not None)
    sums = len(modulations) + (bias is not None)
    partials = x.new_empty((sums, batch, blocks, width), dtype=torch.float32)
    dh, branch, bias = (None if t is None else t.contiguous() for t in (dh, branch, bias))
    (gate, gate_stride), (scale, scale_stride) = _strided(gate), _strided(scale)
    # 128 registers fit _WARPS_PER_PROCESSOR; without a limit the assembler spills to fit more warps.
    registers = 128 if branch is None else None
    run(
        kernels.adaln_bwd_kernel, (batch * blocks,),
        dx, dbranch, partials, dy.contiguous(), dh, x.contiguous(), branch, bias, gate, scale,
        mean.contiguous(), rstd.contiguous(), gate_stride, scale_stride, length, rows, blocks,
        RESIDUAL=dh is not None, maxnreg=registers, **constants,
    )  # fmt: skip
    grid, rows = (sums * batch, triton.cdiv(width, 256)), len(modulations) * batch
    run(kernels.adaln_fold_kernel, grid, modulations, dbias, partials, blocks, rows, D=width, BLOCK_D=256, num_warps=1)
    return outputs


@_adaln_backward_triton.register_fake
def _empty_gradients(
    dy: Tensor, dh: Tensor | None, x: Tensor, branch: Tensor | None, bias: Tensor | None, gate: Tensor | None,
    scale: Tensor, mean: Tensor, rstd: Tensor,
) -> list[Tensor]:  # fmt: skip
    modulations = scale.new_empty((2 if branch is None else 3, *scale.shape))
    gated = [] if branch is None else [x.new_empty(x.shape)]
    biased = [] if bias is None else [x.new_empty((x.shape[0], x.shape[2]), dtype=torch.float32)]
    return [x.new_empty(x.shape), modulations, *gated, *biased]


def _adaln_plain(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, gate: Tensor | None, shift: Tensor, scale: Tensor, eps: float
) -> list[Tensor]:
    """``_adaln_triton`` in plain torch."""
    h = x
    if branch is not None and gate is not None:
        h = x + gate.unsqueeze(1) * (branch if bias is None else branch + bias)
    # In fp32, because on a CPU the statistics come in the dtype of the argument.
    normed, mean, rstd = torch.native_layer_norm(h.float(), h.shape[-1:], None, None, eps)
    y = modulate(normed.to(x.dtype), shift, scale)
    # A view: in fp32 h.float() is h itself, and code compiled by torch 2.11 then drops the gradient of this output.
    return [y, mean, rstd] if branch is None else [y, mean, rstd, h.view_as(h)]


class _AdaLN(torch.autograd.Function):
    """``y``, and ``h`` before it if gated or ``residual``. While compiling, the forward is plain torch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, gate: Tensor | None, shift: Tensor,
        scale: Tensor, eps: float, residual: bool,
    ) -> Any:  # fmt: skip
        forward = _adaln_plain if torch.compiler.is_compiling() else _adaln_triton
        y, mean, rstd, *h = forward(x, branch, bias, gate, shift, scale, eps)
        ctx.save_for_backward(x, branch, bias, gate, scale, mean, rstd)
        return (*(h or [x.view_as(x)]), y) if residual else y

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        *dh, dy = upstream
        x, *saved = ctx.saved_tensors
        gradients = _adaln_backward_triton(dy, dh[0] if dh else None, x, *saved)
        dx, modulations, dbranch, dbias = _four(gradients)
        dshift, dscale, *dgate = modulations.unbind(0)
        dbias = None if dbias is None else dbias.sum(0).to(x.dtype)
        return dx, dbranch, dbias, dgate[0] if dgate else None, dshift, dscale, None, None


def modulated_norm(
    x: Tensor, shift: Tensor, scale: Tensor, *, eps: float = 1e-6, backend: Backend | None = None
) -> Tensor:
    """``layer_norm(x) * (1 + scale) + shift``.

    Args:
        x: ``[B, T, D]`` fp32, bf16 or fp16, D at most 4096; the reference takes any floating dtype and D.
        shift: ``[B, D]``, dtype and device of ``x``; rows need not be adjacent, as in a chunk.
        scale: likewise.
        eps: added to the variance.
        backend: implementation; None: the default of ``dispatch.choose``.

    Returns:
        ``[B, T, D]``, contiguous by the kernel, in the dtype of ``x``.

    Raises:
        ValueError: a wrong shape, dtype or device, or no such backend.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = choose("adaln", x, backend)
    _validate(chosen == "triton", x, shift, scale)
    if chosen == "triton":
        y: Tensor = _AdaLN.apply(x, None, None, None, shift, scale, eps, False)  # type: ignore[no-untyped-call]
    else:
        y = plain(modulated_norm_reference, chosen)(x, shift, scale, eps)
    return y


def residual_modulated_norm(
    x: Tensor, shift: Tensor, scale: Tensor, *, eps: float = 1e-6, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """``x`` itself and ``modulated_norm(x, shift, scale)``, for a residual stream that passes by the norm.

    Continue with the returned ``x``: the backward kernel then adds the gradient of the stream, which otherwise takes
    another pass. Arguments and errors as for ``modulated_norm``.
    """
    if choose("adaln", x, backend) != "triton":
        return x, modulated_norm(x, shift, scale, eps=eps, backend=backend)
    _validate(True, x, shift, scale)
    pair: tuple[Tensor, Tensor] = _AdaLN.apply(x, None, None, None, shift, scale, eps, True)  # type: ignore[no-untyped-call]
    return pair


def gated_modulated_norm(
    x: Tensor, branch: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, *, bias: Tensor | None = None,
    eps: float = 1e-6, backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``h = x + gate * (branch + bias)`` and ``modulated_norm(h, shift, scale)``, each ``[B, T, D]``, in x's dtype.

    Arguments and errors as for ``modulated_norm``; ``branch`` has the shape of ``x``, ``gate`` that of ``shift``.
    ``bias`` ``[D]``, or None, is that of the linear layer before; its gradient then takes no pass of its own.
    """
    chosen = choose("adaln", x, backend)
    given = {"branch": branch, "gate": gate} | ({} if bias is None else {"bias": bias})
    _validate(chosen == "triton", x, shift, scale, **given)
    if chosen == "triton":
        pair: tuple[Tensor, Tensor] = _AdaLN.apply(x, branch, bias, gate, shift, scale, eps, True)  # type: ignore[no-untyped-call]
    else:
        pair = plain(gated_modulated_norm_reference, chosen)(x, branch, gate, shift, scale, bias, eps)
    return pair
