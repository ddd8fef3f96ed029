"""The UNet of IDDPM and ADM in float64 without modules, the reference of ``test_adm.py``.

Written from Ho et al. 2020 (arXiv:2006.11239, appendix B), Nichol & Dhariwal 2021 (arXiv:2102.09672, appendix A) and
Dhariwal & Nichol 2021 (arXiv:2105.05233, section 3), over the names of the published checkpoints.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.config.networks.adm import AdmConfig

Drop = Callable[[int, Tensor], Tensor]
"""Dropout of the map of a residual block, given the number of the block from 0."""


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def sinusoids(time: Tensor, width: int) -> Tensor:
    """Cosines, then sines, of ``t * 10000^(-k / half)``."""
    half = width // 2
    angles = torch.tensor([[float(t) * 10000 ** (-k / half) for k in range(half)] for t in time], dtype=torch.float64)
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=1)


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor) -> Tensor:
    parts = x.reshape(x.shape[0], groups, -1)
    mean = parts.mean(2, keepdim=True)
    spread = ((parts - mean) ** 2).mean(2, keepdim=True)
    normal = ((parts - mean) / torch.sqrt(spread + 1e-5)).reshape(x.shape)
    return normal * weight[:, None, None] + bias[:, None, None]


def bilinear(size: int, large: int) -> Tensor:
    """The matrix of linear interpolation between the centres of pixels; beyond the outer ones their values go on."""
    matrix = torch.zeros(large, size, dtype=torch.float64)
    for i in range(large):
        place = min(max((i + 0.5) * size / large - 0.5, 0.0), size - 1.0)
        low = math.floor(place)
        matrix[i, low] += 1 - (place - low)
        matrix[i, min(low + 1, size - 1)] += place - low
    return matrix


def halved(x: Tensor) -> Tensor:
    return (x[:, :, 0::2, 0::2] + x[:, :, 1::2, 0::2] + x[:, :, 0::2, 1::2] + x[:, :, 1::2, 1::2]) / 4


def doubled(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


class Reference:
    """One evaluation of the network: ``weights`` by name in float64, all of which it must use."""

    def __init__(self, weights: dict[str, Tensor], config: AdmConfig, drop: Drop = lambda block, x: x) -> None:
        self.weights, self.config, self.drop = weights, config, drop
        self.used: set[str] = set()
        self.blocks = 0

    def __call__(
        self, noisy: Tensor, time: Tensor, label: Tensor | None = None, low_res: Tensor | None = None
    ) -> Tensor:
        c, x = self.config, noisy.double()
        if low_res is not None:
            rows, columns = (bilinear(low_res.shape[axis], x.shape[axis]) for axis in (2, 3))
            x = torch.cat([x, rows @ low_res.double() @ columns.T], dim=1)
        self.embedding = self.embed(time, label)
        x = self.conv("input_blocks.0.0", x)
        kept, number, size = [x], 1, c.size
        for level in range(len(c.channel_mult)):
            if level:
                size //= 2
                x = self.resized(f"input_blocks.{number}.0", x, halved)
                kept, number = [*kept, x], number + 1
            for _ in range(c.res_blocks):
                x = self.block(f"input_blocks.{number}", x, attends=size in c.attention_resolutions)
                kept, number = [*kept, x], number + 1
        x = self.residual("middle_block.0", x)
        x = self.attention("middle_block.1", x)
        x = self.residual("middle_block.2", x)
        number = 0
        for level in reversed(range(len(c.channel_mult))):
            for i in range(c.res_blocks + 1):
                attends = size in c.attention_resolutions
                x = self.block(f"output_blocks.{number}", torch.cat([x, kept.pop()], dim=1), attends=attends)
                if level and i == c.res_blocks:
                    size *= 2
                    x = self.resized(f"output_blocks.{number}.{1 + attends}", x, doubled)
                number += 1
        assert not kept
        return self.conv("out.2", silu(self.norm("out.0", x)))

    def weight(self, name: str) -> Tensor:
        self.used.add(name)
        return self.weights[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weight(f"{name}.weight").T + self.weight(f"{name}.bias")

    def conv(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        kernel = self.weight(f"{name}.weight")
        return F.conv2d(x, kernel, self.weight(f"{name}.bias"), stride=stride, padding=kernel.shape[-1] // 2)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return group_norm(x, self.config.norm_num_groups, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))

    def embed(self, time: Tensor, label: Tensor | None) -> Tensor:
        found = self.linear("time_embed.2", silu(self.linear("time_embed.0", sinusoids(time, self.config.width))))
        if not self.config.classes or label is None:
            return found
        table = self.weight("label_emb.weight")
        nothing = torch.zeros_like(table[0])
        return found + torch.stack([table[y] if y < self.config.classes else nothing for y in label.tolist()])

    def block(self, name: str, x: Tensor, *, attends: bool) -> Tensor:
        x = self.residual(f"{name}.0", x)
        return self.attention(f"{name}.1", x) if attends else x

    def resized(self, name: str, x: Tensor, resize: Callable[[Tensor], Tensor]) -> Tensor:
        if self.config.resblock_updown:
            return self.residual(name, x, resize)
        return self.conv(f"{name}.op", x, stride=2) if resize is halved else self.conv(f"{name}.conv", doubled(x))

    def residual(self, name: str, x: Tensor, resize: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        h = self.conv(f"{name}.in_layers.2", resize(silu(self.norm(f"{name}.in_layers.0", x))))
        condition = self.linear(f"{name}.emb_layers.1", silu(self.embedding))[:, :, None, None]
        if self.config.scale_shift_norm:
            scale, shift = condition.split(h.shape[1], dim=1)
            h = self.norm(f"{name}.out_layers.0", h) * (1 + scale) + shift
        else:
            h = self.norm(f"{name}.out_layers.0", h + condition)
        h = self.conv(f"{name}.out_layers.3", self.drop(self.blocks, silu(h)))
        self.blocks += 1
        shortcut = resize(x)
        if shortcut.shape[1] != h.shape[1]:
            shortcut = self.conv(f"{name}.skip_connection", shortcut)
        return shortcut + h

    def attention(self, name: str, x: Tensor) -> Tensor:
        """The channels of ``qkv`` are those of query, key and value of the first head, and so on.

        Or those of the query of the first head, of the second, ..., then those of the keys, then those of the values.
        """
        width = x.shape[1]
        heads = width // self.config.head_channels if self.config.head_channels else self.config.heads
        across, along = {"head_major": (3, 1), "qkv_major": (1, heads)}[self.config.qkv_order]
        tokens = self.norm(f"{name}.norm", x).flatten(2)
        qkv = self.weight(f"{name}.qkv.weight")[:, :, 0] @ tokens + self.weight(f"{name}.qkv.bias")[:, None]
        mixed = []
        parts = qkv.split(width // heads, dim=1)
        for head in range(heads):
            query, key, value = (parts[head * across + kind * along] for kind in range(3))
            scale = (width // heads) ** -0.25
            scores = (query * scale).transpose(1, 2) @ (key * scale)
            odds = torch.exp(scores - scores.max(dim=2, keepdim=True).values)
            mixed.append(value @ (odds / odds.sum(dim=2, keepdim=True)).transpose(1, 2))
        out = self.weight(f"{name}.proj_out.weight")[:, :, 0] @ torch.cat(mixed, dim=1)
        return x + (out + self.weight(f"{name}.proj_out.bias")[:, None]).reshape(x.shape)
