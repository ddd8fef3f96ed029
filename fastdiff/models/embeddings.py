"""Embeddings of pixels, time, class and position as vectors of the width of a token."""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig

_LONGEST_PERIOD = 10_000.0
_FREQUENCIES = 256


class PatchEmbed(nn.Module):
    """Patch embedding: cuts latents into square patches and maps each linearly to a token.

    Tokens are in row-major order, ``T = (H / patch) * (W / patch)``.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.proj = PatchConv2d(config.channels, config.hidden, kernel_size=config.patch, stride=config.patch)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.proj.weight.dtype

    def forward(self, latents: Tensor) -> Tensor:
        """``[B, C, H, W] -> [B, T, D]`` contiguous, both in the dtype of the weights."""
        return _tokens(self.proj(latents))


class BottleneckPatchEmbed(nn.Module):
    """Patch embedding in two layers, the first narrow and without bias (Li & He 2025, arXiv:2511.13720, section 4)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        narrow, patch = config.patch_bottleneck, config.patch
        self.proj1 = PatchConv2d(config.channels, narrow, kernel_size=patch, stride=patch, bias=False)
        self.proj2 = PatchConv2d(narrow, config.hidden, kernel_size=1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.proj2.weight.dtype

    def forward(self, latents: Tensor) -> Tensor:
        """``[B, C, H, W] -> [B, T, D]`` contiguous, both in the dtype of the weights."""
        return _tokens(self.proj2(self.proj1(latents)))


def patch_embedder(config: DiTConfig) -> PatchEmbed | BottleneckPatchEmbed:
    """Return the patch embedding of a network."""
    return BottleneckPatchEmbed(config) if config.patch_bottleneck else PatchEmbed(config)


def _tokens(maps: Tensor) -> Tensor:
    """``[B, D, H/p, W/p] -> [B, T, D]`` contiguous."""
    # With an adapter, sums may have other strides: every block would write and read transposed tokens.
    return maps.flatten(2).transpose(1, 2).contiguous()


class PatchConv2d(nn.Conv2d):
    """Convolution whose stride is the size of its kernel, as one matrix product with the patches.

    torch's writes maps, of which the tokens, and in the backward pass the maps' gradient, are strided copies. Here only
    the patches are copied, which have ``C * p * p`` numbers where a token has D.
    """

    def forward(self, latents: Tensor) -> Tensor:
        """``[B, C, H, W] -> [B, D, H/p, W/p]``, a view of ``[B, H/p, W/p, D]``.

        Raises:
            ValueError: the patch does not divide a side.
        """
        (batch, channels, height, width), (down, across) = latents.shape, self.kernel_size
        if height % down or width % across:
            raise ValueError(f"latents are {height} x {width}, expected multiples of the patch, {down} x {across}")
        cut = latents.reshape(batch, channels, height // down, down, width // across, across)
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3)  # -> [B, H/p, W/p, C * p * p]
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class TimestepEmbedder(nn.Module):
    """Time embedding: 256 sinusoids and a two-layer SiLU MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(_FREQUENCIES, hidden), nn.SiLU(), nn.Linear(hidden, hidden))

    def forward(self, time: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B]`` times ``-> [B, D]`` in ``dtype``, which must be the dtype of the weights."""
        return cast(Tensor, self.mlp(timestep_sinusoids(time, _FREQUENCIES, dtype).to(dtype)))


class LabelEmbedder(nn.Module):
    """Table with one row per class, and a last row for the null class.

    The null row exists for any label dropout, so that checkpoints of the same size are interchangeable and guidance is
    always possible.
    """

    def __init__(self, classes: int, hidden: int) -> None:
        super().__init__()
        self.classes = classes
        self.embedding_table = nn.Embedding(classes + 1, hidden)

    def forward(self, label: Tensor | None, batch: int, device: torch.device) -> Tensor:
        """``[B]`` int64 classes (None: ``batch`` null classes on ``device``) ``-> [B, D]``."""
        if label is None:
            label = torch.full((batch,), self.classes, dtype=torch.int64, device=device)
        return cast(Tensor, self.embedding_table(label))


def timestep_sinusoids(time: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return sinusoids of the time (Vaswani et al. 2017, section 3.5), cosines first, as in the published DiT.

    The largest angle is ``time``, up to T radians, where bf16 is off by whole periods. The angles are therefore
    computed in at least fp32 from constants; a buffer would be cast together with the weights.

    Args:
        time: ``[B]`` int64 or float.
        width: Number of features, even; the periods grow geometrically from 2 pi to 2 pi * 10,000.
        dtype: Dtype of the weights; only float64 raises the precision.

    Returns:
        ``[B, width]`` fp32, or fp64 for ``dtype`` float64.
    """
    exact = torch.promote_types(torch.float32, dtype)
    half = width // 2
    # Rounded in the same order as in diffusers, for every width.
    exponent = -math.log(_LONGEST_PERIOD) * torch.arange(half, dtype=exact, device=time.device) / half
    angles = time.to(exact)[:, None] * torch.exp(exponent)[None]  # [B, 1] * [1, width / 2] -> [B, width / 2]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def position_table(hidden: int, side: int, leading: int = 0) -> Tensor:
    """Return the fixed 2-D sine-cosine position embedding of a square grid of tokens, as in MAE and DiT.

    The first half of the features encodes the column, the second half the row; each has all sines, then all cosines.
    Published checkpoints rely on this order.

    Args:
        hidden: Width of a token, divisible by 4.
        side: Tokens per row and column.
        leading: Tokens in front of the grid, which have rows of zeros.

    Returns:
        ``[1, leading + side * side, hidden]`` fp32, computed in float64.
    """
    quarter = hidden // 4
    frequencies = _LONGEST_PERIOD ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies[None]
    line = torch.cat([angles.sin(), angles.cos()], dim=1)  # [side, D / 4] -> [side, D / 2]
    column = line[None, :, :].expand(side, side, -1)  # [side, D / 2] -> [side, side, D / 2]
    row = line[:, None, :].expand(side, side, -1)
    grid = torch.cat([column, row], dim=2).reshape(1, side * side, hidden).float()
    return F.pad(grid, (0, 0, leading, 0))
