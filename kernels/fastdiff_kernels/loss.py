"""Weighted squared error of a diffusion model's prediction; the noise of the target is drawn again, not read.

``loss_b = weights[t_b] * mean((prediction_b - target_b)^2)`` over the elements of a sample, and its gradient ``2 *
weights[t_b] / elements * (prediction_b - target_b)`` times that of ``loss_b``. A mask multiplies each squared error by
the weight of its pixel before the mean, and the gradient with it: where it is 0, the gradient is 0. The target is
``target_x0[t] * x0 + target_noise[t] * noise`` with the table, the noise and the x0 of ``noising.py`` (Ho et al. 2020,
arXiv:2006.11239, eq. 14; for v Salimans & Ho 2022, arXiv:2202.00512, section 4).

Nothing is stored between the passes: the backward kernel reads the prediction that the model has written anyway and
draws the noise a third time. To store the gradient in the forward pass instead would move 8 bytes, not 6, and round
twice: once when it is stored and once when it is multiplied by the gradient of ``loss_b``. In bf16 and fp16 that is up
to 2.7 times the error of eager PyTorch. Here it is fp32 until it is rounded once, and nothing can overflow or underflow
on the way, whatever the loss scale.

Bytes moved per element in bf16, forward and backward:
* epsilon (no x0 in the target): 2 and 4, 6 together. The limit is 4, for a kernel that knows the gradient of
  ``loss_b`` already in the forward pass. Inductor: 6 and 8, with fp32 noise that is stored.
* v, x0 and flow matching: 4 and 6; a posterior has 2 more in each pass, uint8 pixels 1 less. Inductor: 12 and 6.
* a mask: 2 per pixel more in each pass. The programs of all channels of a sample load it, next to each other in time,
  and all but the first of them find it in the cache.
The sum of a sample is folded from one partial sum per program, in a fixed order, and in fp64 above four elements: a
loss is rounded to fp32 once, so that it hardly depends on how the elements are split.
Limits: contiguous latents. A prediction whose samples are not contiguous (channels_last) is copied first; a slice of
its channels is not. A prediction of twice the channels gets a gradient of 0 in its second half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import jit, run, tl, triton
from fastdiff_kernels.names import Backend
from fastdiff_kernels.noising import (
    COLUMNS,
    Streams,
    check_argument,
    check_latents,
    clean_block,
    clean_reference,
    noise_block,
    noise_reference,
    span,
    tiling,
)
from fastdiff_kernels.philox import SEED_MASK, signed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weighted_mse_reference(
    prediction: Tensor,
    latents: Tensor,
    position: Tensor,
    time: Tensor,
    table: Tensor,
    weights: Tensor,
    seed: int,
    streams: Streams,
    offset: float = 0.0,
    posterior: bool = False,
    clean: bool = True,
    mask: Tensor | None = None,
) -> Tensor:
    """``weighted_mse`` in plain torch: in fp32, or in fp64 for a prediction, a table and weights in fp64."""
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    channels = latents.shape[1] // 2 if posterior else latents.shape[1]
    prediction = prediction[:, :channels].to(dtype)
    of_clean, of_noise = table[time, 2:, None, None, None].unbind(1)  # [T, 4] -> 2 x [B, 1, 1, 1]
    target = of_noise * noise_reference(seed, streams, position, prediction.shape[1:], offset, dtype)
    if clean:
        target = of_clean * clean_reference(latents, seed, streams, position, posterior, dtype) + target
    squares = (prediction - target).square()
    if mask is not None:
        squares = squares * mask[:, None].to(dtype)  # [B, H, W] -> [B, 1, H, W]
    return squares.mean(dim=(1, 2, 3)) * weights[time]


@jit
def _difference(  # type: ignore[no-untyped-def]
    prediction_ptr, latents_ptr, position_ptr, table_ptr,
    step, seed, offset, stride, elements, row, index, group, element, mask,
    NOISE: tl.constexpr, POSTERIOR: tl.constexpr, OFFSET: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """fp32 block of prediction minus target, 0 where masked."""
    place = tl.load(position_ptr + row)
    target = tl.load(table_ptr + 4 * step + 3) * noise_block(seed, place, index, group, offset, NOISE, OFFSET)
    if CLEAN:
        clean = clean_block(latents_ptr, row, elements, element, mask, seed, place, group, POSTERIOR)
        target = tl.load(table_ptr + 4 * step + 2) * clean + target
    guess = tl.load(prediction_ptr + row * stride + element, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, guess - target, 0.0)


@jit
def _of_pixels(mask_ptr, row, index, segment, element, mask):  # type: ignore[no-untyped-def]
    """fp32 weights of the pixels of a block within one channel: segment ``index`` of a sample."""
    pixel = (element - index * segment).to(tl.int32)  # less than 2**31, and half of the registers
    return tl.load(mask_ptr + row * segment + pixel, mask=mask, other=0.0).to(tl.float32)


@jit
def _weighted_mse_fwd_kernel(  # type: ignore[no-untyped-def]
    partials_ptr, prediction_ptr, latents_ptr, position_ptr, time_ptr, table_ptr, mask_ptr,
    seed, offset, stride, elements, segment, segments, tiles,
    NOISE: tl.constexpr, POSTERIOR: tl.constexpr, OFFSET: tl.constexpr, CLEAN: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program sums the squared error of a tile of one sample: groups of four in fp32, these in fp64."""
    program = tl.program_id(0)
    row, index, group, element, mask = span(program, segment, segments, tiles, BLOCK_GROUPS)
    error = _difference(
        prediction_ptr, latents_ptr, position_ptr, table_ptr, tl.load(time_ptr + row), seed, offset, stride, elements,
        row, index, group, element, mask, NOISE, POSTERIOR, OFFSET, CLEAN,
    )  # fmt: skip
    square = error * error
    if mask_ptr is not None:
        square = square * _of_pixels(mask_ptr, row, index, segment, element, mask)
    of_group = tl.sum(tl.reshape(square, [BLOCK_GROUPS, 4]), axis=1)  # [4 * BLOCK_GROUPS] -> [BLOCK_GROUPS]
    tl.store(partials_ptr + program, tl.sum(of_group.to(tl.float64)))


@jit
def _weighted_mse_fold_kernel(  # type: ignore[no-untyped-def]
    losses_ptr, partials_ptr, time_ptr, weights_ptr, elements, programs, BLOCK_PROGRAMS: tl.constexpr
):
    """One program folds the partial sums of one sample into its loss."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_PROGRAMS)
    total = tl.sum(tl.load(partials_ptr + row * programs + column, mask=column < programs, other=0.0))
    weight = tl.load(weights_ptr + tl.load(time_ptr + row)).to(tl.float64)
    tl.store(losses_ptr + row, (total / elements * weight).to(tl.float32))


@jit
def _weighted_mse_bwd_kernel(  # type: ignore[no-untyped-def]
    gradient_ptr, upstream_ptr, prediction_ptr, latents_ptr, position_ptr, time_ptr, table_ptr, weights_ptr, mask_ptr,
    seed, offset, upstream_stride, stride, elements, segment, segments, parts, tiles,
    NOISE: tl.constexpr, POSTERIOR: tl.constexpr, OFFSET: tl.constexpr, CLEAN: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program writes the gradient of a tile of one sample: 0 in the ``parts - segments`` that have no target."""
    row, index, group, element, mask = span(tl.program_id(0), segment, parts, tiles, BLOCK_GROUPS)
    out_ptr = gradient_ptr + row * (segment * parts) + element
    if index < segments:
        step = tl.load(time_ptr + row)
        error = _difference(
            prediction_ptr, latents_ptr, position_ptr, table_ptr, step, seed, offset, stride, elements,
            row, index, group, element, mask, NOISE, POSTERIOR, OFFSET, CLEAN,
        )  # fmt: skip
        if mask_ptr is not None:
            error = error * _of_pixels(mask_ptr, row, index, segment, element, mask)
        share = tl.div_rn(tl.load(upstream_ptr + row * upstream_stride) * tl.load(weights_ptr + step), elements * 1.0)
        tl.store(out_ptr, (share * (2.0 * error)).to(gradient_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(out_ptr, tl.zeros([4 * BLOCK_GROUPS], gradient_ptr.dtype.element_ty), mask=mask)


def _validate_prediction(prediction: Tensor, latents: Tensor, channels: int) -> None:
    expected = (latents.shape[0], channels, *latents.shape[2:])
    if prediction.shape not in (expected, (expected[0], 2 * channels, *expected[2:])):
        raise ValueError(
            f"prediction has shape {tuple(prediction.shape)}, expected {expected} or twice the channels: "
            "those of the latents"
        )
    if prediction.dtype not in _DTYPES:
        raise ValueError(f"prediction is {prediction.dtype}, expected float32, bfloat16 or float16")
    if prediction.device != latents.device:
        raise ValueError(f"prediction is on {prediction.device}, the latents on {latents.device}: expected one device")


def _by_sample(prediction: Tensor, channels: int) -> Tensor:
    """``prediction``, copied unless the first ``channels`` of each sample are contiguous among themselves."""
    by_sample = prediction.shape[0] == 0 or prediction[0, :channels].is_contiguous()
    return prediction if by_sample else prediction.contiguous()


@torch.library.custom_op("fastdiff::weighted_mse", mutates_args=())
def _weighted_mse_triton(
    prediction: Tensor, latents: Tensor, position: Tensor, time: Tensor, table: Tensor, weights: Tensor,
    mask: Tensor | None, seed: int, streams: Sequence[int], offset: float, posterior: bool, clean: bool,
) -> Tensor:  # fmt: skip
    batch, channels, height, width = latents.shape
    channels = channels // 2 if posterior else channels
    prediction, named = _by_sample(prediction, channels), Streams(*streams)
    split = tiling(channels, height * width, by_channel=bool(offset) or mask is not None)
    programs, elements = split.segments * split.tiles, channels * height * width
    partials, losses = table.new_empty(batch, programs, dtype=torch.float64), table.new_empty(batch)
    run(
        _weighted_mse_fwd_kernel, (batch * programs,),
        partials, prediction, latents, position, time, table, mask,
        seed & SEED_MASK, offset, prediction.stride(0), elements, split.segment, split.segments, split.tiles,
        NOISE=named.noise, POSTERIOR=named.posterior if posterior else None, OFFSET=named.offset if offset else None,
        CLEAN=clean, BLOCK_GROUPS=split.groups, num_warps=split.warps, enable_fp_fusion=False,
    )  # fmt: skip
    run(
        _weighted_mse_fold_kernel, (batch,), losses, partials, time, weights, elements, programs,
        BLOCK_PROGRAMS=triton.next_power_of_2(programs), num_warps=1,
    )  # fmt: skip
    return losses


@_weighted_mse_triton.register_fake
def _(
    prediction: Tensor, latents: Tensor, position: Tensor, time: Tensor, table: Tensor, weights: Tensor,
    mask: Tensor | None, seed: int, streams: Sequence[int], offset: float, posterior: bool, clean: bool,
) -> Tensor:  # fmt: skip
    return table.new_empty(latents.shape[0])


@torch.library.custom_op("fastdiff::weighted_mse_backward", mutates_args=())
def _weighted_mse_backward_triton(
    upstream: Tensor, prediction: Tensor, latents: Tensor, position: Tensor, time: Tensor, table: Tensor,
    weights: Tensor, mask: Tensor | None, seed: int, streams: Sequence[int], offset: float, posterior: bool,
    clean: bool,
) -> Tensor:  # fmt: skip
    batch, channels, height, width = latents.shape
    channels = channels // 2 if posterior else channels
    gradient = torch.empty_like(prediction, memory_format=torch.contiguous_format)
    prediction, named = _by_sample(prediction, channels), Streams(*streams)
    split = tiling(channels, height * width, by_channel=bool(offset) or mask is not None)
    parts = split.segments * (prediction.shape[1] // channels)
    # 16 elements per thread and their mask do not fit the registers that the assembler gives them on sm_100.
    warps = split.warps if mask is None else 2 * split.warps
    run(
        _weighted_mse_bwd_kernel, (batch * parts * split.tiles,),
        gradient, upstream, prediction, latents, position, time, table, weights, mask,
        seed & SEED_MASK, offset, upstream.stride(0), prediction.stride(0), channels * height * width,
        split.segment, split.segments, parts, split.tiles,
        NOISE=named.noise, POSTERIOR=named.posterior if posterior else None, OFFSET=named.offset if offset else None,
        CLEAN=clean, BLOCK_GROUPS=split.groups, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return gradient


@_weighted_mse_backward_triton.register_fake
def _(
    upstream: Tensor, prediction: Tensor, latents: Tensor, position: Tensor, time: Tensor, table: Tensor,
    weights: Tensor, mask: Tensor | None, seed: int, streams: Sequence[int], offset: float, posterior: bool,
    clean: bool,
) -> Tensor:  # fmt: skip
    return torch.empty_like(prediction, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    gradient = _weighted_mse_backward_triton(upstream, *ctx.saved_tensors, *ctx.settings)
    return gradient, *(None,) * 11


_weighted_mse_triton.register_autograd(_backward, setup_context=_setup_context)


def weighted_mse(
    prediction: Tensor,
    latents: Tensor,
    position: Tensor,
    time: Tensor,
    table: Tensor,
    weights: Tensor,
    *,
    seed: int,
    streams: Streams = Streams(),  # noqa: B008 - immutable
    offset: float = 0.0,
    posterior: bool = False,
    clean: bool = True,
    mask: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Weighted squared error of each sample, averaged over its elements.

    Args:
        prediction: ``[B, C, H, W]`` of fp32, bf16 or fp16, any strides, or ``[B, 2C, H, W]``, of which only the first
            half is compared. Only this argument gets a gradient.
        latents: as passed to ``noising.corrupt``, like ``position`` and ``table``.
        position: ``[B]`` int64.
        time: ``[B]`` int64 rows of ``table`` and ``weights``, as ``corrupt`` returned them.
        table: ``[T, 4]`` fp32 rows (alpha, sigma, target_x0, target_noise).
        weights: ``[T]`` fp32 weight of the squared error.
        seed: key of every random number, in [0, 2**64); it and the next three as passed to ``corrupt``.
        streams: stream of each purpose.
        offset: size of the constant that each channel's noise is shifted by.
        posterior: whether ``latents`` are mean and std.
        clean: False if ``target_x0`` is 0 in every row; the latents are then not read.
        mask: ``[B, H, W]`` fp16 weight of each pixel's squared error, in all channels; None: 1. The mean is over all
            elements whatever the mask.
        backend: implementation; None: the default of ``dispatch.choose``.

    Returns:
        ``[B]`` fp32; NaN or infinite only for a sample whose prediction or latents are, or overflow fp32 squared.

    Raises:
        ValueError: shape, dtype, device, strides or a value that does not fit; the message says which.
        RuntimeError: Triton was requested and cannot run here.
    """
    check_latents(latents, posterior)
    batch, rows = latents.shape[0], table.shape[0]
    _validate_prediction(prediction, latents, latents.shape[1] // 2 if posterior else latents.shape[1])
    for name, index in (("position", position), ("time", time)):
        check_argument(name, index, torch.int64, (batch,), latents)
    check_argument("table", table, torch.float32, (None, COLUMNS), latents)
    check_argument("weights", weights, torch.float32, (rows,), latents)
    if mask is not None:
        check_argument("mask", mask, torch.float16, (batch, *latents.shape[2:]), latents)
    arguments = (prediction, latents, position, time, table, weights)
    folded = signed(seed)
    chosen = choose("loss", latents, backend)
    if chosen != "triton":
        settings = seed, streams, offset, posterior, clean, mask
        plainly: Tensor = plain(weighted_mse_reference, chosen)(*arguments, *settings)
        return plainly
    losses: Tensor = _weighted_mse_triton(*arguments, mask, folded, list(streams), offset, posterior, clean)
    return losses
