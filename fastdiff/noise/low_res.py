"""The small images that a super-resolution model is given, made of the large ones that it learns to draw."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fastdiff.randomness import Stream, normal, uniform


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
