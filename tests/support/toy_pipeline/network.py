"""The network of the toy pipeline: a perceptron that reads the words of a caption, but not its padding."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

from torch import Tensor, nn

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.models.blockwise import BlockwiseModel, run_block
from fastdiff.models.family import ModelFamily
from fastdiff_kernels.names import AttentionBackend


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyTextConfig(ModelConfig):
    """A perceptron over all latents."""

    kind: Literal["toy-text"] = "toy-text"
    """Kind of the network; not to be changed."""
    channels: int = 12
    """Channels of the latents."""
    size: int = 4
    """Height and width of the latents."""
    tokens: int = 6
    """Tokens of a caption."""
    width: int = 8
    """Width of the embeddings of tokens."""
    hidden: int = 32
    """Width of the hidden layers."""

    family: ClassVar[str] = "toy_pipeline.network:TOY_TEXT_NETWORK"
    title: ClassVar[str] = "a toy network of text"
    text_fields: ClassVar[Mapping[str, str]] = {"context": "width"}
    diffusers_class: ClassVar[str] = "ToyTransformer"

    @property
    def conditions(self) -> Mapping[str, tuple[int, ...]]:
        """Embeddings of tokens, and which of them belong to the caption."""
        return {"context": (self.tokens, self.width), "context_mask": (self.tokens,)}

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> Self:
        """Return the configuration in ``transformer/config.json``."""
        return cls(**{name: value for name, value in config.items() if not name.startswith("_")})

    def to_diffusers(self) -> dict[str, Any]:
        """Return the entries of ``transformer/config.json``."""
        return {name: value for name, value in asdict(self).items() if name != "kind"}


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, D] -> [B, D]``."""
        return hidden + self.linear(hidden).tanh()


class ToyTransformer(BlockwiseModel):
    """Predicts from all latents at once, the time and the mean of a caption's words."""

    block_classes = (Block,)
    config: ToyTextConfig

    def __init__(self, config: ToyTextConfig, *, recompute: bool) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        values = config.channels * config.size**2
        self.into, self.text = nn.Linear(values, config.hidden), nn.Linear(config.width, config.hidden)
        self.time = nn.Linear(1, config.hidden)
        self.blocks = nn.ModuleList(Block(config.hidden) for _ in range(2))
        self.out = nn.Linear(config.hidden, values)

    def forward(self, noisy: Tensor, time: Tensor, context: Tensor, context_mask: Tensor) -> Tensor:
        """``noisy [B, C, H, W], time [B], context [B, L, W], context_mask [B, L] bool -> [B, C, H, W]``."""
        dtype = self.into.weight.dtype
        words = context.to(dtype).masked_fill(~context_mask[..., None], 0).sum(1) / context_mask.sum(1, keepdim=True)
        hidden = self.into(noisy.flatten(1).to(dtype)) + self.time(time[:, None].to(dtype) / 1000)
        hidden = hidden + self.text(words.to(dtype))
        for block in self.blocks:
            hidden = run_block(block, hidden, recompute=self.recompute)
        return self.out(hidden).view_as(noisy)


def _build(config: ToyTextConfig, /, *, recompute: bool, attention: AttentionBackend, seed: int) -> ToyTransformer:
    return ToyTransformer(config, recompute=recompute)


def _inputs(config: ToyTextConfig) -> float:
    return float((config.channels * config.size**2 + config.width + 1) * config.hidden)


TOY_TEXT_NETWORK = ModelFamily(
    config=ToyTextConfig,
    build=_build,
    multiply_adds=lambda config: 2 * _inputs(config) + 2 * config.hidden**2,
    input_multiply_adds=_inputs,
    subject=lambda config: "A toy of text",
    formats={"diffusers": "fastdiff.export.pipeline:DIFFUSERS"},
)
