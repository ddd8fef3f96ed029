"""The UNet of improved-diffusion in plain torch: contiguous maps, and every operation by itself."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.config.networks.adm import AdmConfig


class UNet(nn.Module):
    """Unconditional network without resampling in residual blocks."""

    def __init__(self, config: AdmConfig) -> None:
        super().__init__()
        self._width, widths = config.width, config.widths
        self.time_embed = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.SiLU(), nn.Linear(4 * config.width, 4 * config.width)
        )
        self.input_blocks = nn.ModuleList([_Sequence(nn.Conv2d(config.channels, widths[0], 3, padding=1))])
        size, width, kept = config.size, widths[0], [widths[0]]

        def stage(given: int, wide: int) -> list[nn.Module]:
            attends = [_Attention(config, wide)] if size in config.attention_resolutions else []
            return [_ResBlock(config, given, wide), *attends]

        for level, wide in enumerate(widths):
            if level:
                size //= 2
                self.input_blocks.append(_Sequence(nn.Conv2d(width, width, 3, stride=2, padding=1)))
                kept.append(width)
            for _ in range(config.res_blocks):
                self.input_blocks.append(_Sequence(*stage(width, wide)))
                width = wide
                kept.append(width)
        self.middle_block = _Sequence(
            _ResBlock(config, width, width), _Attention(config, width), _ResBlock(config, width, width)
        )
        self.output_blocks = nn.ModuleList()
        for level, wide in reversed(list(enumerate(widths))):
            for number in range(config.res_blocks + 1):
                layers = stage(width + kept.pop(), wide)
                width = wide
                if level and number == config.res_blocks:
                    layers.append(_Upsample(width))
                    size *= 2
                self.output_blocks.append(_Sequence(*layers))
        last = nn.Conv2d(width, config.channels * (2 if config.learn_sigma else 1), 3, padding=1)
        self.out = nn.Sequential(_Norm(config.norm_num_groups, width), nn.SiLU(), last)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        """Map ``noisy [B, C, H, W], time [B] -> [B, C_out, H, W]``."""
        embedding = self.time_embed(_sinusoids(time, self._width))
        kept, x = [], noisy
        for stage in self.input_blocks:
            x = stage(x, embedding)
            kept.append(x)
        x = self.middle_block(x, embedding)
        for stage in self.output_blocks:
            x = stage(torch.cat([x, kept.pop()], dim=1), embedding)
        out: Tensor = self.out(x)
        return out


def _sinusoids(time: Tensor, width: int) -> Tensor:
    half = width // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(start=0, end=half, dtype=torch.float32) / half)
    angles = time[:, None].float() * frequencies[None]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class _Norm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type(x.dtype)


class _ResBlock(nn.Module):
    def __init__(self, config: AdmConfig, given: int, width: int) -> None:
        super().__init__()
        groups = config.norm_num_groups
        self.in_layers = nn.Sequential(_Norm(groups, given), nn.SiLU(), nn.Conv2d(given, width, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(4 * config.width, 2 * width))
        self.norm = _Norm(groups, width)
        last = nn.Conv2d(width, width, 3, padding=1)
        self.out_layers = nn.Sequential(nn.SiLU(), nn.Dropout(p=config.dropout), last)
        self.skip_connection = nn.Identity() if given == width else nn.Conv2d(given, width, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        out = self.in_layers(x)
        scale, shift = torch.chunk(self.emb_layers(embedding)[..., None, None], 2, dim=1)
        out = self.norm(out) * (1 + scale) + shift
        summed: Tensor = self.skip_connection(x) + self.out_layers(out)
        return summed


class _Attention(nn.Module):
    def __init__(self, config: AdmConfig, width: int) -> None:
        super().__init__()
        self._heads = config.heads_of(width)
        self.norm = _Norm(config.norm_num_groups, width)
        self.qkv = nn.Conv1d(width, 3 * width, 1)
        self.proj_out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, *spatial = x.shape
        x = x.reshape(batch, channels, -1)
        qkv = self.qkv(self.norm(x))
        query, key, value = torch.split(
            qkv.reshape(batch * self._heads, -1, qkv.shape[2]), channels // self._heads, dim=1
        )
        scale = 1 / math.sqrt(math.sqrt(channels // self._heads))
        weight = torch.einsum("bct,bcs->bts", query * scale, key * scale)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        mixed = torch.einsum("bts,bcs->bct", weight, value).reshape(batch, -1, x.shape[-1])
        summed: Tensor = x + self.proj_out(mixed)
        return summed.reshape(batch, channels, *spatial)


class _Upsample(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        enlarged: Tensor = self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))
        return enlarged


class _Sequence(nn.Sequential):
    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self:
            x = layer(x, embedding) if isinstance(layer, _ResBlock) else layer(x)
        return x
