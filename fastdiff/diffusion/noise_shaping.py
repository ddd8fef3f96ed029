"""Multi-resolution noise (noise of ever coarser grids, added to the noise of every pixel), and low-resolution inputs.

Whitaker 2023, "Multi-Resolution Noise for Diffusion Model Training". Here each level has half the size of the previous
one instead of a random size, and the sum is divided by its exact standard deviation instead of the batch's. So the
noise of a sample does not depend on the other samples of its batch.
"""

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.rng import Stream, normal, uniform


def pyramid(seed: int, position: Tensor, shape: Sequence[int], iterations: int, discount: float) -> Tensor:
    """Return the sum of the coarser levels, without the noise of every pixel: ``[B, *shape]`` fp32.

    Args:
        seed: key of every random number.
        position: ``[B]`` int64 positions in the run.
        shape: (C, H, W).
        iterations: number of levels; it ends at the first level of a single pixel.
        discount: scale of each level relative to the previous one; for the first, to the noise of every pixel.
    """
    channels, height, width = shape
    total = torch.zeros(len(position), *shape, device=position.device)
    grids = _grids(height, width, iterations)
    if not grids:
        return total
    counts = [channels * rows * columns for rows, columns in grids]
    drawn = torch.split(normal(seed, Stream.MULTIRES, position, (sum(counts),)), counts, dim=1)
    for level, (grid, values) in enumerate(zip(grids, drawn, strict=True), start=1):
        coarse = values.view(len(position), channels, *grid)  # [B, C * h * w] -> [B, C, h, w]
        total += discount**level * F.interpolate(coarse, size=(height, width), mode="bilinear")
    return total


@functools.cache
def unit_scale(shape: tuple[int, ...], iterations: int, discount: float) -> float:
    """Return the inverse standard deviation of the noise of all levels together, averaged over the pixels.

    Args:
        shape: (C, H, W).
        iterations: as for ``pyramid``.
        discount: as for ``pyramid``.
    """
    _, height, width = shape
    variance = 1.0
    for level, (rows, columns) in enumerate(_grids(height, width, iterations), start=1):
        variance += discount ** (2 * level) * _variance(rows, height) * _variance(columns, width)
    return 1.0 / math.sqrt(variance)


def _grids(height: int, width: int, iterations: int) -> list[tuple[int, int]]:
    """Return rows and columns of each level, up to the first of 1 by 1; empty for a map of one pixel."""
    halvings = min(iterations, max(height, width).bit_length() - 1)
    return [(max(1, height >> n), max(1, width >> n)) for n in range(1, halvings + 1)]


def _variance(coarse: int, fine: int) -> float:
    """Return the mean variance of ``fine`` points, interpolated linearly from ``coarse`` cells of variance 1.

    A point lies between the centres of two cells, or outside the outermost centre and takes its value.
    """
    total = 0.0
    for point in range(fine):
        place = min(max((point + 0.5) * coarse / fine - 0.5, 0.0), coarse - 1.0)
        share = place - math.floor(place)
        total += share**2 + (1.0 - share) ** 2
    return total / fine


def small_images(clean: Tensor, size: int, *, noise: float, seed: int, position: Tensor) -> Tensor:
    """Return area averages (Nichol & Dhariwal 2021, arXiv:2102.09672, section 5), optionally with noise.

    Noise makes a super-resolution model robust to generated inputs (conditioning augmentation, Ho et al. 2022,
    arXiv:2106.15282, section 4). Its standard deviation is uniform in [0, ``noise``), so that the training includes
    clean images.

    Args:
        clean: ``[B, C, H, W]`` fp32.
        size: height and width of the small images.
        noise: maximum standard deviation; 0: no noise.
        seed: seed of the run.
        position: ``[B]`` int64 positions in the run.

    Returns:
        ``[B, C, size, size]`` fp32.
    """
    small = F.interpolate(clean, size=size, mode="area")  # [B, C, H, W] -> [B, C, size, size]
    if not noise:
        return small
    deviation = noise * uniform(seed, Stream.LOW_RES_LEVEL, position, 1).view(-1, 1, 1, 1)
    return small + deviation * normal(seed, Stream.LOW_RES, position, small.shape[1:])
