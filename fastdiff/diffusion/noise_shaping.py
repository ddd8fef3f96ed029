"""Multi-resolution noise: noise of coarser and coarser grids, added to the noise of every pixel.

Whitaker 2023, "Multi-Resolution Noise for Diffusion Model Training". Each level is half the size of the one before, not
of a random size, and the whole is divided by its exact standard deviation, not by that of a batch: so that the noise of
a sample does not depend on the samples beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.rng import Stream, normal, uniform


def pyramid(seed: int, position: Tensor, shape: Sequence[int], iterations: int, discount: float) -> Tensor:
    """The coarser levels together, without the noise of every pixel: ``[B, *shape]`` fp32.

    Args:
        seed: key of every random number.
        position: ``[B]`` int64 positions in the run.
        shape: (C, H, W).
        iterations: levels; those after the one of a single pixel are left out.
        discount: size of each level over that of the one before; of the first, over the noise of every pixel.
    """
    channels, height, width = shape
    total = torch.zeros(len(position), *shape, device=position.device)
    grids = _grids(height, width, iterations)
    if not grids:
        return total
    counts = [channels * rows * columns for rows, columns in grids]
    drawn = torch.split(normal(seed, Stream.MULTIRES, position, (sum(counts),)), counts, dim=1)
    for level, (grid, values) in enumerate(zip(grids, drawn, strict=True), start=1):
        coarse = values.view(len(position), channels, *grid)
        total += discount**level * F.interpolate(coarse, size=(height, width), mode="bilinear")
    return total


@functools.cache
def unit_scale(shape: tuple[int, ...], iterations: int, discount: float) -> float:
    """One over the standard deviation of a pixel's noise, all levels together, on average over the pixels.

    Args:
        shape: (C, H, W).
        iterations: as for ``pyramid``.
        discount: likewise.
    """
    _, height, width = shape
    variance = 1.0
    for level, (rows, columns) in enumerate(_grids(height, width, iterations), start=1):
        variance += discount ** (2 * level) * _variance(rows, height) * _variance(columns, width)
    return 1.0 / math.sqrt(variance)


def _grids(height: int, width: int, iterations: int) -> list[tuple[int, int]]:
    """Rows and columns of each level; none is listed after the first of 1 by 1, nor for a map of one pixel."""
    halvings = min(iterations, max(height, width).bit_length() - 1)
    return [(max(1, height >> n), max(1, width >> n)) for n in range(1, halvings + 1)]


def _variance(coarse: int, fine: int) -> float:
    """Mean over ``fine`` points of the variance that linear interpolation leaves of ``coarse`` of variance 1.

    A point lies between the centres of two cells, or beyond those of the outermost, whose value it then takes.
    """
    total = 0.0
    for point in range(fine):
        place = min(max((point + 0.5) * coarse / fine - 0.5, 0.0), coarse - 1.0)
        share = place - math.floor(place)
        total += share**2 + (1.0 - share) ** 2
    return total / fine


def small_images(clean: Tensor, size: int, *, noise: float, seed: int, position: Tensor) -> Tensor:
    """Means over areas (Nichol & Dhariwal 2021, arXiv:2102.09672, section 5), with or without noise.

    Noise keeps a model that is applied to generated images from trusting their details (conditioning augmentation, Ho
    et al. 2022, arXiv:2106.15282, section 4). Its standard deviation is drawn evenly from [0, ``noise``), so that
    images without noise are known too.

    Args:
        clean: ``[B, C, H, W]`` fp32.
        size: height and width of the small images.
        noise: largest standard deviation; 0: none.
        seed: of the run.
        position: ``[B]`` int64 positions in the run.

    Returns:
        ``[B, C, size, size]`` fp32.
    """
    small = F.interpolate(clean, size=size, mode="area")
    if not noise:
        return small
    deviation = noise * uniform(seed, Stream.LOW_RES_LEVEL, position, 1).view(-1, 1, 1, 1)
    return small + deviation * normal(seed, Stream.LOW_RES, position, small.shape[1:])
