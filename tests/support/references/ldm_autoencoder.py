"""The autoencoder of latent diffusion, written plainly in float64 from its paper (Rombach et al. 2022, appendix G).

Its modules have the published names: ``encoder.down.0.block.0``, ``encoder.mid.attn_1``, ``decoder.up.0.upsample``. A
level may have an attention after each block, as VA-VAE's coarsest has.
"""

import itertools
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, width, eps=1e-6)


class _Block(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(into), nn.Conv2d(into, out, 3, padding=1)
        self.norm2, self.conv2 = _norm(out), nn.Conv2d(out, out, 3, padding=1)
        if into != out:
            self.nin_shortcut = nn.Conv2d(into, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        shortcut: Tensor = self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x
        return shortcut + h


class _Attention(nn.Module):
    """One head over all positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2) for layer in (self.q, self.k, self.v))  # [B, C, N]
        weights = torch.softmax(torch.einsum("bci,bcj->bij", q, k) / x.shape[1] ** 0.5, dim=-1)
        found: Tensor = x + self.proj_out(torch.einsum("bij,bcj->bci", weights, v).view_as(x))
        return found


class _Resize(nn.Module):
    def __init__(self, width: int, *, down: bool) -> None:
        super().__init__()
        self.down = down
        self.conv = nn.Conv2d(width, width, 3, stride=2) if down else nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        # Down: one row and one column of zeros, at the end alone.
        resized: Tensor = F.pad(x, (0, 1, 0, 1)) if self.down else F.interpolate(x, scale_factor=2.0, mode="nearest")
        found: Tensor = self.conv(resized)
        return found


class _Level(nn.Module):
    def __init__(self, widths: Sequence[int], attends: bool, resize: str | None) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.block = nn.ModuleList(_Block(into, out) for into, out in pairs)
        self.attn = nn.ModuleList(_Attention(out) for _, out in pairs) if attends else nn.ModuleList()
        self.resize = resize
        if resize:
            setattr(self, resize, _Resize(widths[-1], down=resize == "downsample"))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[number](x)
        return getattr(self, self.resize)(x) if self.resize else x


class _Middle(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block_1, self.attn_1, self.block_2 = _Block(width, width), _Attention(width), _Block(width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.block_2(self.attn_1(self.block_1(x)))
        return found


class _Encoder(nn.Module):
    def __init__(self, widths: Sequence[int], blocks: int, out: int, attends: Collection[int]) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, widths[0], 3, padding=1)
        before, levels = widths[0], []
        for level, width in enumerate(widths):
            resize = "downsample" if level < len(widths) - 1 else None
            levels.append(_Level([before, *[width] * blocks], level in attends, resize))
            before = width
        self.down, self.mid = nn.ModuleList(levels), _Middle(before)
        self.norm_out, self.conv_out = _norm(before), nn.Conv2d(before, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        found: Tensor = self.conv_out(F.silu(self.norm_out(self.mid(x))))
        return found


class _Decoder(nn.Module):
    def __init__(self, widths: Sequence[int], blocks: int, channels: int, attends: Collection[int]) -> None:
        super().__init__()
        self.conv_in, self.mid = nn.Conv2d(channels, widths[-1], 3, padding=1), _Middle(widths[-1])
        before, levels = widths[-1], {}
        for level in reversed(range(len(widths))):
            resize = "upsample" if level else None
            levels[level] = _Level([before, *[widths[level]] * (blocks + 1)], level in attends, resize)
            before = widths[level]
        self.up = nn.ModuleList(levels[level] for level in range(len(widths)))
        self.norm_out, self.conv_out = _norm(before), nn.Conv2d(before, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):  # type: ignore[call-overload]
            x = level(x)
        found: Tensor = self.conv_out(F.silu(self.norm_out(x)))
        return found


class LdmAutoencoder(nn.Module):
    """Random weights; ``attends``: the levels, from the finest, with an attention after each block."""

    def __init__(self, widths: Sequence[int], blocks: int, channels: int, attends: Collection[int] = ()) -> None:
        super().__init__()
        self.encoder = _Encoder(widths, blocks, 2 * channels, attends)
        self.decoder = _Decoder(widths, blocks, channels, attends)
        self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1)
        self.post_quant_conv = nn.Conv2d(channels, channels, 1)

    def mean(self, images: Tensor) -> Tensor:
        """Return the mean of the posterior."""
        found: Tensor = self.quant_conv(self.encoder(images)).chunk(2, dim=1)[0]
        return found

    def decode(self, latents: Tensor) -> Tensor:
        """Return images in about [-1, 1]."""
        found: Tensor = self.decoder(self.post_quant_conv(latents))
        return found
