"""Angles of the rotary position embedding in two dimensions (Su et al. 2021, arXiv:2104.09864, section 3.2)."""

import torch
import torch.nn.functional as F
from torch import Tensor

_BASE = 10_000.0


def rotary_table(
    side: int, head_dim: int, extra: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles by which neighbouring pairs of channels of a head are rotated.

    The first half of the pairs rotates by the row of the patch, the second by its column, each from a period of 2 pi
    to one of 2 pi * 10,000. They are computed from constants, because a buffer would be cast together with the weights.

    Args:
        side: Patches per row and column.
        head_dim: Channels of a head, divisible by 4.
        extra: Tokens in front of the patches, which are not rotated.
        dtype: Of the weights; only float64 raises the precision.
        device: Of the result.

    Returns:
        Twice ``[extra + side * side, head_dim / 2]`` fp32, or fp64 for ``dtype`` float64.
    """
    quarter = head_dim // 4
    frequencies = _BASE ** -(torch.arange(quarter, dtype=torch.float64, device=device) / quarter)
    line = torch.arange(side, dtype=torch.float64, device=device)[:, None] * frequencies[None]  # [side, d / 4]
    row = line[:, None, :].expand(side, side, -1)  # [side, d / 4] -> [side, side, d / 4]
    column = line[None, :, :].expand(side, side, -1)
    angles = F.pad(torch.cat([row, column], dim=2).flatten(0, 1), (0, 0, extra, 0))
    exact = torch.promote_types(torch.float32, dtype)
    return angles.cos().to(exact), angles.sin().to(exact)
