"""The last layer of a DiT."""

from collections.abc import Iterator

from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.models.dit.modulation import MODULATIONS
from fastdiff.models.dit.norm import ModulatedNorm
from fastdiff.models.linear import output_layer
from fastdiff_kernels import dispatch
from fastdiff_kernels.adaln import Modulation


class FinalLayer(nn.Module):
    """Modulated norm, and the linear maps from tokens to patches and to the class token of a teacher."""

    linear_cls: nn.Linear | None
    """Of the class token; None: there is none."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        channels = config.channels * (2 if config.learn_sigma else 1)
        self.norm_final = ModulatedNorm(config)
        ratio, token = config.width_ratio, config.teacher_width
        self.linear = output_layer(config.hidden, config.patch**2 * channels, ratio)
        self.linear_cls = output_layer(config.hidden, token, ratio) if token else None
        self.starts_at_zero = config.teacher_zero
        self.adaLN_modulation = MODULATIONS[config.modulation].of_layer(config.hidden, 2)

    def forward(self, tokens: Tensor, condition: Tensor) -> tuple[Tensor, Tensor | None]:
        """``tokens [B, T, D], condition [B, D] -> [B, T, p * p * C_out]``, and None.

        With a class token in front of the patches, ``tokens [B, 1 + T, D]``, the second one is its prediction.
        """
        normed = self.norm_final(tokens, Modulation(self.adaLN_modulation(condition)))
        if self.linear_cls is None:
            return self.linear(normed), None
        return self.linear(normed[:, 1:]), self.linear_cls(normed[:, 0])

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its adaLN; see ``fastdiff_kernels.dispatch.Explains``."""
        yield dispatch.choice("adaln", example)
