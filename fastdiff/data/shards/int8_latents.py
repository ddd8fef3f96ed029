"""Latents in 8 bits: 256 levels between the smallest and the largest value of each channel of each sample.

A channel is constant or has values ``low + step * (level + 128)``; the largest error is half a step. Low and step are a
column of their own in float32, 8 bytes per channel.
"""

import torch
from torch import Tensor

LEVELS, _FIRST = 255, -128
"""Steps between the smallest and the largest value of a channel, and the integer of the smallest."""


def quantised(latents: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels and limits of latents.

    Args:
        latents: ``[B, C, H, W]`` floating point.

    Returns:
        ``[B, C, H, W]`` int8, and ``[B, 2, C]`` float32, low and step; not finite where a latent is not.
    """
    values = latents.float()
    low, high = values.amin((2, 3)), values.amax((2, 3))
    limits = torch.stack([low, (high - low) / LEVELS], dim=1)
    step = torch.where(limits[:, 1] > 0, limits[:, 1], 1.0)[..., None, None]
    levels = ((values - low[..., None, None]) / step).round().clamp(0, LEVELS).nan_to_num(0.0)
    return (levels + _FIRST).to(torch.int8), limits


def dequantised(levels: Tensor, limits: Tensor) -> Tensor:
    """Return the latents ``[B, C, H, W]`` fp32 of levels and limits, see ``quantised``."""
    low, step = limits[..., None, None].unbind(1)  # [B, 2, C] -> 2 x [B, C, 1, 1]
    return (levels.float() - _FIRST).mul_(step).add_(low)
