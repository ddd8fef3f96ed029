"""Noise-add: one kernel draws the timestep and the noise of each sample and mixes them with its latents.

``x_t = alpha[t] * x0 + sigma[t] * (noise + perturbation * extra)`` (Ho et al. 2020, arXiv:2006.11239, eq. 4) with

* ``t = floor(uniform * T)`` unless the caller gives it,
* ``x0 = latents``, of uint8 pixels ``(level - 127.5) * (1 / 127.5)``, or ``mean + std * normal`` of a posterior that is
  stored as mean and std stacked on channels,
* ``noise = normal + offset * channel normal``: the second is one number per sample and channel, part of the target,
* ``extra = normal``, in the input only (Ning et al. 2023, arXiv:2301.11706, eq. 10).

Every random number is a pure function of (seed, stream, position, element) as in ``philox.py``, so that nothing random
is stored: ``loss.py`` draws the same noise and the same x0 again. Elements are numbered in row-major order over
``(C, H, W)``. Arithmetic is fp32, and the coefficients come from an fp32 table whatever the dtype of the latents: in
bf16 the sigma of the first steps would be 0.

One table serves every parametrisation. Its row of timestep t is ``(alpha, sigma, target_x0, target_noise)``, and the
target is ``target_x0 * x0 + target_noise * noise``: (0, 1) for epsilon, (1, 0) for x0, (-sigma, alpha) for v, and
(-1, 1) for flow matching, where alpha = 1 - t and sigma = t.

Bytes moved per element, bf16 latents and bf16 ``noisy``: 4, which is the limit (6 with a posterior, which is two
numbers to read; 3 of uint8 pixels; fp32 ``noisy`` adds 2). Inductor moves 8, because it stores the noise in fp32 for
the loss. There is no backward pass: latents are data.
Limits: contiguous latents; at most 2**24 timesteps where t is drawn; a given t is not compared with the table's length,
because that would wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff_kernels import philox
from fastdiff_kernels.dispatch import choose, plain
from fastdiff_kernels.launch import constant, jit, run, tl, triton
from fastdiff_kernels.names import Backend
from fastdiff_kernels.philox import SEED_MASK, box_muller, philox_words, signed

COLUMNS = 4
"""Of the table: alpha, sigma, target_x0, target_noise."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIDDLE, _PER_LEVEL = 127.5, 1 / 127.5
_MIDDLE_LEVEL, _PER_LEVEL_FP32 = constant(_MIDDLE), constant(_PER_LEVEL)
_GROUPS_PER_PROGRAM = 512
_GROUPS_PER_WARP = 128


class Streams(NamedTuple):
    """The random stream of each purpose; two purposes never share one."""

    timestep: int = 0
    noise: int = 1
    posterior: int = 2
    perturbation: int = 5
    offset: int = 6


def uniform_time(share: Tensor, timesteps: int) -> Tensor:
    """Timestep of each uniform fp32 number in [0, 1): int64 in [0, timesteps) for at most 2**24 timesteps."""
    # The product of the largest fp32 below 1 and T <= 2**24 rounds to a number below T, so it needs no clamp.
    return (share * timesteps).floor().to(torch.int64)


def noise_reference(
    seed: int, streams: Streams, position: Tensor, shape: Sequence[int], offset: float, dtype: torch.dtype
) -> Tensor:
    """Noise of the target, offset included: ``[B, C, H, W]`` of ``dtype``, from fp32 normals; ``shape``: (C, H, W)."""
    noise = _normal(seed, streams.noise, position, shape, dtype)
    if offset:
        noise = noise + offset * _normal(seed, streams.offset, position, (shape[0], 1, 1), dtype)
    return noise


def dequantised(latents: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Latents in ``dtype``, fp32 or fp64; uint8 pixels become ``(level - 127.5) * (1 / 127.5)``, which is in [-1, 1].

    In fp32 that is at most 7.5e-8 from ``level / 127.5 - 1``, and -1 and 1 are exact. A quotient would not have the
    same bits everywhere: on a GPU PyTorch multiplies by the rounded inverse instead.
    """
    values = latents.to(dtype)
    return (values - _MIDDLE) * _PER_LEVEL if latents.dtype == torch.uint8 else values


def clean_reference(
    latents: Tensor, seed: int, streams: Streams, position: Tensor, posterior: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """x0 in ``dtype``, fp32 or fp64: the latents themselves, or a sample of the posterior they hold."""
    latents = dequantised(latents, dtype)
    if not posterior:
        return latents
    mean, std = latents.chunk(2, dim=1)
    return mean + std * _normal(seed, streams.posterior, position, mean.shape[1:], dtype)


def _normal(seed: int, stream: int, position: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    flat = philox.normal(seed, stream, position, math.prod(shape), "reference")
    return flat.view(position.shape[0], *shape).to(dtype)


def corrupt_reference(
    latents: Tensor,
    position: Tensor,
    table: Tensor,
    seed: int,
    streams: Streams,
    time: Tensor | None = None,
    offset: float = 0.0,
    perturbation: float = 0.0,
    posterior: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``corrupt`` in plain torch: in the dtype of the table, fp32 or fp64; ``dtype`` None: that one."""
    if time is None:
        share = philox.uniform(seed, streams.timestep, position, 1, "reference")[:, 0]
        time = uniform_time(share, table.shape[0])
    clean = clean_reference(latents, seed, streams, position, posterior, table.dtype)
    added = noise_reference(seed, streams, position, clean.shape[1:], offset, clean.dtype)
    if perturbation:
        added = added + perturbation * _normal(seed, streams.perturbation, position, clean.shape[1:], clean.dtype)
    alpha, sigma = table[time, :2, None, None, None].unbind(1)
    noisy = alpha * clean + sigma * added
    return noisy.to(dtype or noisy.dtype), time


@jit
def normals(seed, stream, position, group):  # type: ignore[no-untyped-def]
    """Standard normal fp32 block of the elements ``4 * group + lane``; each thread holds four neighbours."""
    w0, w1, w2, w3 = philox_words(seed, stream, position, group)
    n0, n1 = box_muller(w0, w1)
    n2, n3 = box_muller(w2, w3)
    return tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))


@jit
def _channel_normal(seed, stream, position, channel):  # type: ignore[no-untyped-def]
    """Standard normal fp32 scalar: element ``channel`` of the stream."""
    w0, w1, w2, w3 = philox_words(seed, stream, position, channel // 4)
    lane = channel % 4
    even, odd = box_muller(tl.where(lane < 2, w0, w2), tl.where(lane < 2, w1, w3))
    return tl.where(lane % 2 == 0, even, odd)


@jit
def noise_block(seed, position, channel, group, offset, NOISE: tl.constexpr, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Noise of the target for the groups of one channel, or of any if ``OFFSET`` is None."""
    noise = normals(seed, NOISE, position, group)
    if OFFSET is not None:
        noise = noise + offset * _channel_normal(seed, OFFSET, position, channel)
    return noise


@jit
def clean_block(latents_ptr, row, elements, element, mask, seed, position, group, POSTERIOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 x0 of the groups of one sample; ``POSTERIOR``: stream that samples it from mean and std, or None."""
    if latents_ptr.dtype.element_ty == tl.uint8:
        level = tl.load(latents_ptr + row * elements + element, mask=mask, other=0)
        return (level.to(tl.float32) - _MIDDLE_LEVEL) * _PER_LEVEL_FP32
    if POSTERIOR is not None:
        mean_ptr = latents_ptr + 2 * row * elements + element
        std = tl.load(mean_ptr + elements, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr, mask=mask, other=0.0).to(tl.float32)
        return mean + std * normals(seed, POSTERIOR, position, group)
    return tl.load(latents_ptr + row * elements + element, mask=mask, other=0.0).to(tl.float32)


@jit
def span(program, segment, segments, tiles, BLOCK_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The part of a sample of one program: (row, segment's index, groups, elements, mask of those that it owns).

    A sample has ``segments`` segments of ``segment`` elements, and each has ``tiles`` programs. A segment need not
    start with a group: the group in which two segments meet is drawn by both.
    """
    tile, part = program % tiles, program // tiles
    row, index = (part // segments).to(tl.int64), (part % segments).to(tl.int64)
    first = index * segment
    start = first // 4 + tile.to(tl.int64) * BLOCK_GROUPS
    element = 4 * start + tl.arange(0, 4 * BLOCK_GROUPS)
    return row, index, start + tl.arange(0, BLOCK_GROUPS), element, (element >= first) & (element < first + segment)


@jit
def _corrupt_kernel(  # type: ignore[no-untyped-def]
    noisy_ptr, drawn_ptr, latents_ptr, position_ptr, table_ptr, time_ptr,
    seed, timesteps, offset, perturbation, elements, segment, segments, tiles,
    TIMESTEP: tl.constexpr, NOISE: tl.constexpr, POSTERIOR: tl.constexpr, PERTURBATION: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """One program writes a tile of one sample; a stream that is None is not drawn."""
    program = tl.program_id(0)
    row, index, group, element, mask = span(program, segment, segments, tiles, BLOCK_GROUPS)
    place = tl.load(position_ptr + row)
    if TIMESTEP is not None:
        word = philox_words(seed, TIMESTEP, place, row * 0)[0]
        step = (tl.uint_to_uniform_float(word) * timesteps).to(tl.int64)
        tl.store(drawn_ptr + row, step, mask=program % (segments * tiles) == 0)
    else:
        step = tl.load(time_ptr + row)
    alpha, sigma = tl.load(table_ptr + 4 * step), tl.load(table_ptr + 4 * step + 1)
    clean = clean_block(latents_ptr, row, elements, element, mask, seed, place, group, POSTERIOR)
    added = noise_block(seed, place, index, group, offset, NOISE, OFFSET)
    if PERTURBATION is not None:
        added = added + perturbation * normals(seed, PERTURBATION, place, group)
    value = alpha * clean + sigma * added
    tl.store(noisy_ptr + row * elements + element, value.to(noisy_ptr.dtype.element_ty), mask=mask)


class Tiling(NamedTuple):
    """The programs of a sample."""

    segment: int
    """Elements that share one offset: a channel if there is an offset, otherwise a whole sample."""
    segments: int
    """Per sample."""
    tiles: int
    """Programs per segment."""
    groups: int
    """Groups of four elements per program."""
    warps: int


def tiling(channels: int, area: int, by_channel: bool) -> Tiling:
    """Split a sample of ``channels`` times ``area`` elements, so that no program has two channels if ``by_channel``."""
    segment, segments = (area, channels) if by_channel else (channels * area, 1)
    # A segment that does not start with a group reaches up to 3 elements further.
    reach = segment + 3 * (segments > 1 and segment % 4 > 0)
    groups = min(_GROUPS_PER_PROGRAM, max(16, triton.next_power_of_2(triton.cdiv(reach, 4))))
    return Tiling(segment, segments, triton.cdiv(reach, 4 * groups), groups, max(1, groups // _GROUPS_PER_WARP))


def check_latents(latents: Tensor, posterior: bool) -> None:
    """Raise ValueError unless these are contiguous latents that a kernel can read."""
    shape = tuple(latents.shape)
    if latents.dim() != 4 or 0 in shape[1:]:
        raise ValueError(f"latents have shape {shape}, expected [B, C, H, W] with C, H and W of at least 1")
    if posterior and shape[1] % 2:
        raise ValueError(f"latents have {shape[1]} channels, expected an even number: mean and std, stacked on them")
    if latents.dtype not in (*_DTYPES, torch.uint8):
        raise ValueError(
            f"latents are {latents.dtype}, expected float32, bfloat16 or float16, or pixels in uint8; use "
            "latents.float()"
        )
    if posterior and latents.dtype == torch.uint8:
        raise ValueError("latents are torch.uint8, which are pixels, and pixels have no posterior; use posterior=False")
    if not latents.is_contiguous():
        raise ValueError(
            f"latents have strides {latents.stride()}, expected contiguous [B, C, H, W]; use latents.contiguous()"
        )
    if latents.requires_grad:
        raise ValueError("latents require a gradient, but they are data here and get none; use latents.detach()")


def check_argument(name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], like: Tensor) -> None:
    """Raise ValueError unless ``value`` has this dtype, shape (None: any) and the device of ``like``, contiguous."""
    expected = f"{str(dtype).removeprefix('torch.')} [{', '.join('any' if n is None else str(n) for n in shape)}]"
    fits = value.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, value.shape, strict=True))
    if value.dtype != dtype or not fits:
        given = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        raise ValueError(f"{name} is {given}, expected {expected}")
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device}, expected {like.device}; use {name}.to(latents.device)")
    if not value.is_contiguous():
        raise ValueError(f"{name} has strides {value.stride()}, expected contiguous; use {name}.contiguous()")


def _empty(latents: Tensor, time: Tensor | None, posterior: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, channels, height, width = latents.shape
    noisy = latents.new_empty(batch, channels // 2 if posterior else channels, height, width, dtype=dtype)
    return noisy, latents.new_empty(batch if time is None else 0, dtype=torch.int64)


@torch.library.custom_op("fastdiff::corrupt", mutates_args=())
def _corrupt_triton(
    latents: Tensor, position: Tensor, table: Tensor, time: Tensor | None, seed: int, streams: Sequence[int],
    offset: float, perturbation: float, posterior: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernel; the second output is the drawn timesteps, empty if ``time`` is given."""
    noisy, drawn = _empty(latents, time, posterior, dtype)
    batch, channels, height, width = noisy.shape
    named = Streams(*streams)
    split = tiling(channels, height * width, by_channel=bool(offset))
    run(
        _corrupt_kernel, (batch * split.segments * split.tiles,),
        noisy, drawn, latents, position, table, drawn if time is None else time,
        seed & SEED_MASK, table.shape[0], offset, perturbation, channels * height * width,
        split.segment, split.segments, split.tiles,
        TIMESTEP=named.timestep if time is None else None, NOISE=named.noise,
        POSTERIOR=named.posterior if posterior else None, PERTURBATION=named.perturbation if perturbation else None,
        OFFSET=named.offset if offset else None, BLOCK_GROUPS=split.groups, num_warps=split.warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return noisy, drawn


@_corrupt_triton.register_fake
def _(
    latents: Tensor, position: Tensor, table: Tensor, time: Tensor | None, seed: int, streams: Sequence[int],
    offset: float, perturbation: float, posterior: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty(latents, time, posterior, dtype)


def corrupt(
    latents: Tensor,
    position: Tensor,
    table: Tensor,
    *,
    seed: int,
    streams: Streams = Streams(),  # noqa: B008 - immutable
    time: Tensor | None = None,
    offset: float = 0.0,
    perturbation: float = 0.0,
    posterior: bool = False,
    dtype: torch.dtype = torch.float32,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a timestep and noise for each sample and mix the noise in.

    Args:
        latents: clean latents ``[B, C, H, W]``, or with ``posterior`` their mean and std ``[B, 2C, H, W]``; fp32, bf16
            or fp16, or pixels ``[B, C, H, W]`` uint8 (``dequantised``); contiguous.
        position: ``[B]`` int64 position of each sample in the run.
        table: ``[T, 4]`` fp32 rows (alpha, sigma, target_x0, target_noise), one per timestep.
        seed: key of every random number, in [0, 2**64).
        streams: stream of each purpose.
        time: ``[B]`` int64 rows of the table, in [0, T); None: drawn, each equally often.
        offset: size of the constant that each channel's noise is shifted by, a normal number times this.
        perturbation: size of the extra noise, which is not part of the target.
        posterior: whether x0 is sampled here from mean and std.
        dtype: of ``noisy``: fp32, bf16 or fp16. The dtype of the model halves the bytes, and changes no number for a
            model that first rounds its input to it.
        backend: implementation; None: the default of ``dispatch.choose``.

    Returns:
        ``noisy``, ``[B, C, H, W]`` of ``dtype``, and the timesteps, ``[B]`` int64 (``time`` itself if it was given).

    Raises:
        ValueError: shape, dtype, device, strides or a value that does not fit; the message says which.
        RuntimeError: Triton was requested and cannot run here.
    """
    check_latents(latents, posterior)
    check_argument("position", position, torch.int64, (latents.shape[0],), latents)
    check_argument("table", table, torch.float32, (None, COLUMNS), latents)
    if time is not None:
        check_argument("time", time, torch.int64, (latents.shape[0],), latents)
    elif not 0 < table.shape[0] <= 2**24:
        raise ValueError(f"table has {table.shape[0]} rows, expected 1 to 2**24 to draw timesteps; give time")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype}: expected float32, bfloat16 or float16")
    folded = signed(seed)
    chosen = choose("noising", latents, backend)
    if chosen != "triton":
        plainly: tuple[Tensor, Tensor] = plain(corrupt_reference, chosen)(
            latents, position, table, seed, streams, time, offset, perturbation, posterior, dtype
        )
        return plainly
    noisy, drawn = _corrupt_triton(
        latents, position, table, time, folded, list(streams), offset, perturbation, posterior, dtype
    )
    return noisy, drawn if time is None else time
