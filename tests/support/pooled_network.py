"""A network that takes the tokens and the pooled embedding of a caption, but no sizes, like those of SD3 and Flux."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.family import ModelFamily
from fastdiff_kernels.names import AttentionBackend


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledConfig(ModelConfig):
    """A convolution, moved by the embeddings of a caption."""

    kind: Literal["pooled"] = "pooled"
    """Kind of the network; not to be changed."""
    channels: int = 4
    """Channels of the latents."""
    size: int = 8
    """Height and width of the latents."""
    width: int = 32
    """Width of the embeddings of tokens."""
    pooled_width: int = 16
    """Width of the pooled embedding."""

    family: ClassVar[str] = "tests.support.pooled_network:POOLED"
    title: ClassVar[str] = "a network with pooled embeddings"

    @property
    def conditions(self) -> Mapping[str, tuple[int, ...]]:
        """Both embeddings of a caption."""
        return {"context": (77, self.width), "pooled": (self.pooled_width,)}


class Pooled(BlockwiseModel):
    """``noisy [B, C, H, W], time [B], context [B, L, D], pooled [B, P] -> [B, C, H, W]``."""

    config: PooledConfig

    def __init__(self, config: PooledConfig) -> None:
        super().__init__()
        self.config = config
        self.image = nn.Conv2d(config.channels, config.channels, 3, padding=1)
        self.text = nn.Linear(config.width, config.channels)
        self.pooled = nn.Linear(config.pooled_width, config.channels)

    def forward(self, noisy: Tensor, time: Tensor, context: Tensor, pooled: Tensor) -> Tensor:
        """See the class."""
        dtype = self.text.weight.dtype
        moved = self.text(context.to(dtype)).mean(1) + self.pooled(pooled.to(dtype)) + time[:, None].to(dtype) / 1000
        out: Tensor = self.image(noisy.to(dtype)) + moved[..., None, None]
        return out


def _build(config: PooledConfig, /, *, recompute: bool, attention: AttentionBackend, seed: int) -> Pooled:
    return Pooled(config)


def _image(config: PooledConfig) -> float:
    return 9.0 * config.channels**2 * config.size**2


def _text(config: PooledConfig) -> float:
    return float((77 * config.width + config.pooled_width) * config.channels)


POOLED = ModelFamily(
    config=PooledConfig,
    build=_build,
    multiply_adds=lambda config: _image(config) + _text(config),
    input_multiply_adds=lambda config: _image(config) + _text(config),
    subject=lambda config: "A network with pooled embeddings",
)
