"""Embeddings of pixels, positions, time, size and caption, named as in diffusers."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.models.embeddings import PatchConv2d, timestep_sinusoids
from fastdiff.models.unet.blocks import TimestepEmbedding

_FREQUENCIES = 256
_LONGEST_PERIOD = 10_000.0
_SHARES = 3
"""Height, width and aspect ratio have a third of the width each."""


class PatchEmbed(nn.Module):
    """Patch embedding with fixed sine-cosine positions; it takes any multiple of the patch."""

    def __init__(self, config: PixArtConfig) -> None:
        super().__init__()
        self.base, self.divisor = config.side, config.pe_interpolation
        self.proj = PatchConv2d(config.channels, config.hidden, kernel_size=config.patch, stride=config.patch)

    def forward(self, latents: Tensor) -> Tensor:
        """``[B, C, H, W] -> [B, T, D]`` contiguous, tokens in row-major order, both in the dtype of the weights."""
        maps = self.proj(latents).permute(0, 2, 3, 1)  # [B, D, H/p, W/p] -> [B, H/p, W/p, D]
        height, width, hidden = maps.shape[1:]
        table = positions(hidden, height, width, base=self.base, divisor=self.divisor, device=latents.device)
        tokens: Tensor = maps + table.to(maps.dtype)
        return tokens.reshape(len(maps), height * width, hidden)


def positions(
    hidden: int, height: int, width: int, *, base: int, divisor: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the sine-cosine positions of a grid of tokens.

    Each side of any grid spans the positions 0 to ``base / divisor``. The first half of the features encodes the
    column, the second half the row; each has all sines, then all cosines. Published checkpoints rely on this order.

    Args:
        hidden: width of a token, divisible by 4.
        height: tokens per column.
        width: tokens per row.
        base: tokens per row and column of the grid to which the positions refer.
        divisor: ``pe_interpolation``.
        device: of the result.

    Returns:
        ``[height, width, hidden]`` fp32, computed in float64 from fp32 positions, as published.
    """
    quarter = hidden // 4
    frequencies = _LONGEST_PERIOD ** -(torch.arange(quarter, dtype=torch.float64, device=device) / quarter)

    def line(count: int) -> Tensor:
        place = torch.arange(count, dtype=torch.float32, device=device) / (count / base) / divisor
        angles = place.double()[:, None] * frequencies[None]
        return torch.cat([angles.sin(), angles.cos()], dim=1).float()  # [count, D / 2]

    columns = line(width)[None, :, :].expand(height, -1, -1)
    rows = line(height)[:, None, :].expand(-1, width, -1)
    return torch.cat([columns, rows], dim=2)


class AdaLayerNormSingle(nn.Module):
    """Embedding of time and size, and the modulations that all blocks share (adaLN-single, arXiv:2310.00426)."""

    def __init__(self, config: PixArtConfig) -> None:
        super().__init__()
        self.emb = TimeAndSize(config)
        self.linear = nn.Linear(config.hidden, 6 * config.hidden)

    def forward(self, time: Tensor, time_ids: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the shared modulations ``[B, 6D]`` and the embedding ``[B, D]``; arguments as in ``TimeAndSize``."""
        embedding = self.emb(time, time_ids, dtype)
        return self.linear(F.silu(embedding)), embedding


class TimeAndSize(nn.Module):
    """Embedding of the time and, with ``size_conditioning``, of the size of the image file and of the aspect ratio."""

    def __init__(self, config: PixArtConfig) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(_FREQUENCIES, config.hidden)
        share = config.hidden // _SHARES
        sized = config.size_conditioning
        self.resolution_embedder = TimestepEmbedding(_FREQUENCIES, share) if sized else None
        self.aspect_ratio_embedder = TimestepEmbedding(_FREQUENCIES, share) if sized else None

    def forward(self, time: Tensor, time_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Add the embeddings.

        Args:
            time: ``[B]``.
            time_ids: ``[B, 6]`` sizes and crop in pixels, see ``fastdiff.conditions.time_ids``; None without
                ``size_conditioning``.
            dtype: of the weights.

        Returns:
            ``[B, D]`` in ``dtype``.
        """
        embedding = cast(Tensor, self.timestep_embedder(_sinusoids(time, dtype)))
        if self.resolution_embedder is None or self.aspect_ratio_embedder is None or time_ids is None:
            return embedding
        file, crop = time_ids[:, :2], time_ids[:, 4:]  # height and width each
        sides = self.resolution_embedder(_sinusoids(file.flatten(), dtype)).view(len(file), -1)  # -> [B, 2D / 3]
        ratio = self.aspect_ratio_embedder(_sinusoids(crop[:, 0] / crop[:, 1], dtype))  # -> [B, D / 3]
        return embedding + torch.cat([sides, ratio], dim=1)


def _sinusoids(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """``[N] -> [N, 256]`` in ``dtype``."""
    return timestep_sinusoids(numbers, _FREQUENCIES, dtype).to(dtype)


class CaptionProjection(nn.Module):
    """Two linear layers with the tanh form of GELU between them, from the text encoder's width to that of a token."""

    def __init__(self, config: PixArtConfig) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(config.caption_dim, config.hidden)
        self.linear_2 = nn.Linear(config.hidden, config.hidden)

    def forward(self, context: Tensor) -> Tensor:
        """``[B, L, caption_dim] -> [B, L, D]``, both in the dtype of the weights."""
        return cast(Tensor, self.linear_2(F.gelu(self.linear_1(context), approximate="tanh")))
