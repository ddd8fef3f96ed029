"""The norm of a token with shift and scale from the condition: layer norm, or RMSNorm with or without a weight."""

from typing import Literal

import torch
from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff_kernels.adaln import Modulation, gated_modulated_norm, modulated_norm, residual_modulated_norm


class ModulatedNorm(nn.Module):
    """``norm(x) * (1 + scale) + shift``, alone or with the residual stream beside it (``fastdiff_kernels.adaln``)."""

    weight: nn.Parameter | None
    """``[D]``, of ``rms-weight`` alone."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.kind: Literal["layer", "rms"] = "layer" if config.norm == "layer" else "rms"
        self.eps = config.norm_eps
        weighted = config.norm == "rms-weight"
        self.register_parameter("weight", nn.Parameter(torch.empty(config.hidden)) if weighted else None)
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor, modulation: Modulation) -> Tensor:
        """``[B, T, D] -> [B, T, D]``."""
        return modulated_norm(x, modulation, norm=self.kind, weight=self.weight, eps=self.eps)

    def residual(self, x: Tensor, modulation: Modulation) -> tuple[Tensor, Tensor]:
        """Return ``x``, with which the stream continues, and its norm; only blocks may call it, see ``network``."""
        return residual_modulated_norm(x, modulation, norm=self.kind, weight=self.weight, eps=self.eps)

    def gated(self, x: Tensor, branch: Tensor, modulation: Modulation, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``x + gate * (branch + bias)`` and its norm; only blocks may call it, see ``network``."""
        return gated_modulated_norm(x, branch, modulation, bias=bias, norm=self.kind, weight=self.weight, eps=self.eps)
