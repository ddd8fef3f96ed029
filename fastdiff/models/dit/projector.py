"""Head that projects the features of a block to those of a teacher (REPA; Yu et al. 2024, arXiv:2410.06940)."""

from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig


class Projectors(nn.ModuleList):
    """Three layers with SiLU between them, in training alone; their names are those of the authors' weights."""

    def __init__(self, config: DiTConfig) -> None:
        hidden = config.aligned_hidden
        super().__init__(
            [
                nn.Sequential(
                    nn.Linear(config.hidden, hidden),
                    nn.SiLU(),
                    nn.Linear(hidden, hidden),
                    nn.SiLU(),
                    nn.Linear(hidden, config.aligned_width),
                )
            ]
        )
        self._tokens = config.side**2 + config.aligned_token

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T, D] -> [B, N, aligned_width]``: the patches, which are last, and with ``aligned_token`` one more."""
        projected: Tensor = self[0](tokens[:, -self._tokens :])
        return projected
