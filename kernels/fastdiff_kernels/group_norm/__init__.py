"""Group normalisation and SiLU of feature maps, contiguous or channels_last, with the additions before them in a UNet.

``h = x + shift + residual``, ``y = silu((h - mean) / sqrt(var + eps) * weight + bias)``; mean and (biased) variance are
over the positions and channels of one group of one sample. Source: Wu & He 2018, "Group normalization", equations 1 and
2; ``silu(z) = z / (1 + exp(-z))``. With ``n = (h - mean) * rstd`` and ``dz`` the gradient of the argument of the SiLU,

    dweight = sum(dz * n),  dbias = sum(dz),  dh = rstd * (weight * dz - E[weight * dz] - n * E[weight * dz * n]),

where E is the mean over a group, and shift gets the sum of dh. Weight and bias are numbers per channel, or per sample
and channel, ``[N, C]``: those of a condition (Nichol & Dhariwal 2021, arXiv:2102.09672, appendix A), whose dweight and
dbias are sums over the positions of one sample. Only h, and mean and rstd in fp32 per group, are kept for the backward
pass; n and the SiLU are computed again.

Bytes moved per element of a 2-byte x, counted:

    ============================  ===========  ============  =============  ================
    form                          forward      backward      least f / b    Inductor f / b
    ============================  ===========  ============  =============  ================
    two passes                    6 + 36/rows  10 + 68/rows  4 / 6          6.19 / 18.14
    one pass                      4 + 8/hw     6 + 32/hw     4 / 6          6.19 / 18.14
    two passes, with a residual   10 + 36/rows 12 + 68/rows  8 / 8          12.19 / 20.14
    one pass, with a residual     8 + 8/hw     8 + 32/hw     8 / 8          12.19 / 20.14
    ============================  ===========  ============  =============  ================

Terms with ``rows`` (the positions that one program works through) or ``hw`` (all positions) are fp32 numbers per
channel. Weights per sample are read as often as others, and their gradients add 8 / hw to the bytes written. The least
counts every tensor once; two passes reach it where the second finds its input in the L2 cache. One pass is used where
whole groups fit in the registers of one program, in 32 KiB of x: in SD 1.5 the 8x8 maps and the 16x16 maps of up to
1280 channels. The tiling of a sample depends on its own shape alone, so that its output does not depend on its batch.

Limits: fewer than 2**31 elements per sample. Accesses are 128 bits wide where C (channels_last) or the number of
positions (contiguous) is a multiple of 16, otherwise narrower. A gradient of y or h whose strides are not those of x is
copied once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.group_norm import kernels
from fastdiff_kernels.group_norm.tiling import (
    Shape,
    Tiling,
    channels_last,
    fold_constants,
    one_pass_constants,
    power_of_2,
)
from fastdiff_kernels.launch import run, triton
from fastdiff_kernels.names import Backend


def group_norm_reference(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5, silu: bool = True,
    shift: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """``group_norm`` in plain torch, of any floating dtype and strides; arguments as there.

    Weights per sample enter in at least fp32, as in the kernel: they are sums with numbers from the
    condition that are small compared to 1, which 16 bits would lose. The result is rounded once, at the end.
    """

    def per_channel(value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype).reshape(*x.shape[:2], *(1 for _ in x.shape[2:]))  # [N, C] -> [N, C, 1, ...]

    h = x if shift is None else x + per_channel(shift, x.dtype)
    h = h if residual is None else h + residual
    if weight.dim() == 1:
        y = F.group_norm(h, groups, weight.to(x.dtype), bias.to(x.dtype), eps)
    else:
        exact = torch.promote_types(torch.float32, x.dtype)
        normal = F.group_norm(h.to(exact), groups, eps=eps)
        y = torch.addcmul(per_channel(bias, exact), normal, per_channel(weight, exact))
    y = (F.silu(y) if silu else y).to(x.dtype)
    if channels_last(x):  # on CUDA torch's norm is contiguous whatever x is
        y = y.movedim(1, -1).contiguous().movedim(-1, 1)
    return y if residual is None else (y, h)


def _validate(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, shift: Tensor | None, residual: Tensor | None,
    chosen: Backend,
) -> None:  # fmt: skip
    if x.dim() < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [N, C, ...]; use x.reshape(N, C, -1)")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16, *([] if chosen == "triton" else [torch.float64])):
        raise ValueError(f"x is {x.dtype}, expected float32, bfloat16 or float16; use x.float()")
    if not (x.is_contiguous() or channels_last(x)):
        raise ValueError(
            f"x of shape {tuple(x.shape)} has strides {x.stride()}, expected those of contiguous or channels_last "
            "memory; use x.contiguous(memory_format=torch.channels_last) or x.contiguous()"
        )
    if not 1 <= groups <= x.shape[1] or x.shape[1] % groups:
        raise ValueError(f"groups {groups}: expected a divisor of the {x.shape[1]} channels of x")
    if x.shape[1:].numel() >= 2**31:
        raise ValueError(f"x of shape {tuple(x.shape)} has 2**31 or more elements per sample, expected fewer")
    if not eps >= 0:
        raise ValueError(f"eps {eps}: expected a number that is not negative")
    affine = x.shape[:2] if weight.dim() == 2 else x.shape[1:2]
    for name, value, shape in (
        ("weight", weight, affine),
        ("bias", bias, affine),
        ("shift", shift, x.shape[:2]),
    ):
        if value is not None:
            _validate_like(x, name, value, shape, (x.dtype, torch.float32))
    if residual is not None:
        _validate_like(x, "residual", residual, x.shape, (x.dtype,))
        if not (channels_last(residual) if channels_last(x) else residual.is_contiguous()):
            raise ValueError(
                f"residual has strides {residual.stride()}, expected those of x, {x.stride()}; "
                "use torch.empty_like(x).copy_(residual)"
            )


def _validate_like(x: Tensor, name: str, value: Tensor, shape: torch.Size, dtypes: tuple[torch.dtype, ...]) -> None:
    if value.shape != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {tuple(shape)} for x {tuple(x.shape)}")
    if value.dtype not in dtypes:
        names = " or ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
        raise ValueError(f"{name} is {value.dtype}, expected {names}; use {name}.to(x.dtype)")
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device}, expected {x.device} like x; use {name}.to(x.device)")


def _empty(x: Tensor, residual: Tensor | None, groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = x.new_empty(0) if residual is None else torch.empty_like(x)
    mean = x.new_empty(x.shape[0], groups, dtype=torch.float32)
    return torch.empty_like(x), h, mean, torch.empty_like(mean)


@torch.library.custom_op("fastdiff::group_norm", mutates_args=())
def _group_norm_triton(
    x: Tensor, shift: Tensor | None, residual: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernels: y, h (empty without a residual), mean and rstd ``[N, groups]`` fp32."""
    y, h, mean, rstd = _empty(x, residual, groups)
    summed = None if residual is None else h
    shape = Shape.of(x, groups)
    constants = {"SILU": silu, "PER_GROUP": shape.per_group, "OWN": weight.dim() == 2}
    one_pass = one_pass_constants(shape)
    if one_pass is not None:
        blocks = triton.cdiv(groups, one_pass["SPAN"])
        run(
            kernels.group_norm_fwd_one_pass_kernel, (shape.samples * blocks,),
            x, shift, residual, weight, bias, summed, y, mean, rstd, *shape.sizes, blocks, eps,
            **constants, **one_pass,
        )  # fmt: skip
        return y, h, mean, rstd
    tiling = Tiling.of(shape)
    grid = (shape.samples * tiling.chunks * tiling.blocks,)
    partial = mean.new_empty(shape.samples, tiling.chunks, 2, shape.channels)
    run(
        kernels.group_norm_fwd_statistics_kernel, grid,
        x, shift, residual, summed, partial, *shape.sizes, *tiling.sizes, **tiling.options,
    )  # fmt: skip
    run(
        kernels.group_norm_fwd_fold_kernel, (shape.samples * groups,),
        partial, mean, rstd, shape.hw, shape.channels, tiling.rows, tiling.chunks, groups, eps,
        **fold_constants(shape, tiling.chunks),
    )  # fmt: skip
    source, added = (x, shift) if summed is None else (summed, None)
    run(
        kernels.group_norm_fwd_apply_kernel, grid,
        source, added, weight, bias, mean, rstd, y, *shape.sizes, *tiling.sizes, **constants, **tiling.options,
    )  # fmt: skip
    return y, h, mean, rstd


@_group_norm_triton.register_fake
def _(
    x: Tensor, shift: Tensor | None, residual: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty(x, residual, groups)


def _empty_gradients(
    h: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dshift = h.new_empty(0) if shift is None else torch.empty_like(shift)
    return torch.empty_like(h), dshift, torch.empty_like(weight), torch.empty_like(bias)


def _in_the_order_of(x: Tensor, gradient: Tensor) -> Tensor:
    same = channels_last(gradient) if channels_last(x) else gradient.is_contiguous()
    return gradient if same else torch.empty_like(x).copy_(gradient)


def _fold_rows(partial: Tensor, batch: int, first: Tensor, second: Tensor | None = None) -> None:
    """Sum fp32 ``[batch * rows, C]`` over rows into ``first``; of ``[batch * rows, 2, C]`` both parts."""
    channels = partial.shape[-1]
    rows = partial.shape[:-1].numel() // (max(1, batch) * (1 if second is None else 2))
    blocks = triton.cdiv(channels, 16)
    run(
        kernels.group_norm_fold_rows_kernel, (batch * blocks,),
        partial, first, second, rows, channels, blocks, BLOCK_R=min(128, power_of_2(rows)), BLOCK_C=16, num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("fastdiff::group_norm_backward", mutates_args=())
def _group_norm_backward_triton(
    dy: Tensor, dh: Tensor | None, h: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor,
    rstd: Tensor, silu: bool, summed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward kernels: gradients of x, shift (empty without one), weight and bias.

    ``h`` is the input, or if ``summed`` the sum, which contains the shift already and may have a gradient ``dh``.
    """
    dx, dshift, dweight, dbias = gradients = _empty_gradients(h, shift, weight, bias)
    dy = _in_the_order_of(h, dy)
    added = None if summed else shift
    dh = None if dh is None else _in_the_order_of(h, dh)
    shape = Shape.of(h, mean.shape[1])
    state = (added, weight, bias, mean, rstd)
    own = weight.dim() == 2
    rows = shape.samples if own else 1
    constants = {"SILU": silu, "PER_GROUP": shape.per_group, "OWN": own}
    one_pass = one_pass_constants(shape)
    if one_pass is not None:
        blocks = triton.cdiv(shape.groups, one_pass["SPAN"])
        partial = mean.new_empty(shape.samples, 2, shape.channels)
        run(
            kernels.group_norm_bwd_one_pass_kernel, (shape.samples * blocks,),
            h, dy, dh, *state, dx, None if shift is None else dshift, partial, *shape.sizes, blocks,
            **constants, **one_pass,
        )  # fmt: skip
        _fold_rows(partial, rows, dbias, dweight)
        return gradients
    tiling = Tiling.of(shape)
    grid = (shape.samples * tiling.chunks * tiling.blocks,)
    partial = mean.new_empty(shape.samples, tiling.chunks, 2, shape.channels)
    run(
        kernels.group_norm_bwd_statistics_kernel, grid,
        h, dy, *state, partial, *shape.sizes, *tiling.sizes, **constants, **tiling.options,
    )  # fmt: skip
    level, slope = (mean.new_empty(shape.samples, shape.channels) for _ in range(2))
    run(
        kernels.group_norm_bwd_fold_kernel, (shape.samples * shape.groups,),
        partial, weight, rstd, level, slope, shape.hw, shape.channels, tiling.chunks, shape.groups,
        OWN=own, **fold_constants(shape, tiling.chunks),
    )  # fmt: skip
    _fold_rows(partial, rows, dbias, dweight)
    sums = None if shift is None else mean.new_empty(shape.samples, tiling.chunks, shape.channels)
    run(
        kernels.group_norm_bwd_apply_kernel, grid,
        h, dy, dh, *state, level, slope, dx, sums, *shape.sizes, *tiling.sizes, **constants, **tiling.options,
    )  # fmt: skip
    if sums is not None:
        _fold_rows(sums, shape.samples, dshift)
    return gradients


@_group_norm_backward_triton.register_fake
def _(
    dy: Tensor, dh: Tensor | None, h: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor,
    rstd: Tensor, silu: bool, summed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_gradients(h, shift, weight, bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, shift, residual, weight, bias, _, _, ctx.silu = inputs
    _, h, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # the last norm of a network has no gradient of its sum: zeros would be read
    ctx.has_shift, ctx.has_residual = shift is not None, residual is not None
    ctx.save_for_backward(x if residual is None else h, shift, weight, bias, mean, rstd)


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    h, *state = ctx.saved_tensors
    dy = torch.zeros_like(h) if dy is None else dy
    dh = dh if ctx.has_residual else None  # of an empty tensor
    dx, dshift, dweight, dbias = _group_norm_backward_triton(dy, dh, h, *state, ctx.silu, ctx.has_residual)
    shifted, added = dshift if ctx.has_shift else None, dx if ctx.has_residual else None
    return dx, shifted, added, dweight, dbias, None, None, None


_group_norm_triton.register_autograd(_backward, setup_context=_setup_context)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-5,
    silu: bool = True,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Group normalisation and SiLU: ``silu(norm(x + shift + residual) * weight + bias)``.

    Args:
        x: ``[N, C, ...]`` fp32, bf16 or fp16, without Triton also fp64; contiguous or channels_last.
        groups: groups of neighbouring channels; divides C.
        weight: ``[C]``, or ``[N, C]`` with one row per sample: factor per channel, of x's dtype or fp32.
        bias: summand per channel, of the shape and dtypes of the weight.
        eps: added to the variance; not negative.
        silu: whether SiLU follows the normalisation.
        shift: ``[N, C]`` added to every position of x (a convolution's bias, a time embedding), of x's dtype or fp32.
        residual: added to x; its shape, dtype and strides.
        backend: implementation; None: the default of ``dispatch.choose``.

    Returns:
        The output, of x's shape, dtype and strides; with a residual also the sum ``h = x + shift + residual``.

    Raises:
        ValueError: a shape, dtype, device, stride, ``groups``, ``eps`` or ``backend`` that is not as above.
        RuntimeError: Triton was requested and cannot run here.
    """
    chosen = choose("group_norm", x, backend)
    _validate(x, groups, weight, bias, eps, shift, residual, chosen)
    if chosen != "triton":
        out: Tensor | tuple[Tensor, Tensor] = plain(group_norm_reference, chosen)(
            x, groups, weight, bias, eps, silu, shift, residual
        )
        return out
    shift = None if shift is None else shift.contiguous()
    y, h, _, _ = _group_norm_triton(x, shift, residual, weight.contiguous(), bias.contiguous(), groups, eps, silu)
    return y if residual is None else (y, h)
