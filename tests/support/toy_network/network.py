"""The toy network."""

import torch
from torch import Tensor, nn

from fastdiff.models.blockwise import BlockwiseModel, run_block
from toy_network.config import ToyConfig


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, D] -> [B, D]``."""
        return hidden + torch.tanh(self.linear(hidden))


class Toy(BlockwiseModel):
    """Predicts from all pixels at once, the time and a class."""

    block_classes = (Block,)
    config: ToyConfig

    def __init__(self, config: ToyConfig, *, recompute: bool) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        pixels = config.channels * config.size**2
        self.into = nn.Linear(pixels + 1, config.hidden)
        self.labels = nn.Embedding(config.classes + 1, config.hidden)
        self.blocks = nn.ModuleList(Block(config.hidden) for _ in range(2))
        self.out = nn.Linear(config.hidden, pixels)

    def forward(self, noisy: Tensor, time: Tensor, label: Tensor) -> Tensor:
        """``noisy [B, C, H, W], time [B], label [B] -> [B, C, H, W]``."""
        dtype = self.into.weight.dtype
        given = torch.cat([noisy.flatten(1).to(dtype), time[:, None].to(dtype) / 1000], dim=1)
        hidden = self.into(given) + self.labels(label)
        for block in self.blocks:
            hidden = run_block(block, hidden, recompute=self.recompute)
        return self.out(hidden).view_as(noisy)
