"""The last layer of a DiT."""

from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.models.dit.modulation import MODULATIONS
from fastdiff.models.dit.norm import ModulatedNorm
from fastdiff_kernels import dispatch
from fastdiff_kernels.adaln import Modulation


class FinalLayer(nn.Module):
    """Modulated norm, and the linear map from tokens to patches."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        channels = config.channels * (2 if config.learn_sigma else 1)
        self.norm_final = ModulatedNorm(config)
        self.linear = nn.Linear(config.hidden, config.patch**2 * channels)
        self.adaLN_modulation = MODULATIONS[config.modulation].of_layer(config.hidden, 2)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """``tokens [B, T, D], condition [B, D] -> [B, T, p * p * C_out]``."""
        modulation = Modulation(self.adaLN_modulation(condition))
        return cast(Tensor, self.linear(self.norm_final(tokens, modulation)))

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its adaLN; see ``fastdiff_kernels.dispatch.Explains``."""
        yield dispatch.choice("adaln", example)
