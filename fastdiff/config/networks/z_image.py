"""Shape of Z-Image's transformer (Alibaba 2025, arXiv:2511.22699). This module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastdiff.conditions import Shape
from fastdiff.config.networks.diffusers_transformer import DiffusersTransformerConfig
from fastdiff.config.sections.objective import FlowConvention
from fastdiff.errors import require

PATCH = 2
MULTIPLE = 32
"""Captions and pictures are padded to a multiple of so many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZImageConfig(DiffusersTransformerConfig):
    """Z-Image: one stream of picture and caption tokens, each refined by blocks of its own before."""

    kind: Literal["z-image"] = "z-image"
    """Kind of the network; not to be changed."""
    channels: int = 16
    """Channels of the latents (in_channels in diffusers' configurations)."""
    size: int = 128
    """Default height and width of sampled latents, an eighth of those of the image; the network takes any even size."""
    dim: int = 3840
    """Width of a token."""
    n_layers: int = 30
    """Number of blocks of the joint stream."""
    n_refiner_layers: int = 2
    """Number of blocks that refine each of picture and caption."""
    n_heads: int = 30
    """Attention heads."""
    n_kv_heads: int = 30
    """Attention heads of keys and values."""
    norm_eps: float = 1e-5
    """Added to mean squares in norms."""
    qk_norm: bool = True
    """Normalise queries and keys."""
    cap_feat_dim: int = 2560
    """Width of the text embeddings."""
    rope_theta: float = 256.0
    """Base of the rotary frequencies."""
    t_scale: float = 1000.0
    """Factor of the time before its features."""
    axes_dims: tuple[int, ...] = (32, 48, 48)
    """Channels of a head that each axis rotates: caption position, row, column."""
    axes_lens: tuple[int, ...] = (1024, 512, 512)
    """Positions on each axis."""
    caption_tokens: int = 512
    """Length of a caption, by which operations are counted; the network takes any."""

    family: ClassVar[str] = "fastdiff.models.transformers.z_image:Z_IMAGE"
    title: ClassVar[str] = "a Z-Image"
    flow_convention: ClassVar[FlowConvention] = "sit"
    lora_targets: ClassVar[tuple[str, ...]] = ("to_k", "to_q", "to_v", "to_out.0")
    diffusers_class: ClassVar[str] = "ZImageTransformer2DModel"
    text_fields: ClassVar[Mapping[str, str]] = {"context": "cap_feat_dim"}
    text_length: ClassVar[str] = "caption_tokens"
    fixed: ClassVar[Mapping[str, Any]] = {"all_patch_size": (2,), "all_f_patch_size": (1,), "siglip_feat_dim": None}

    def __post_init__(self) -> None:
        # Not super(): slots make a new class, which the method does not know.
        DiffusersTransformerConfig.__post_init__(self)
        channels = self.head_dim
        require(
            self.dim == self.n_heads * channels,
            f"--model.dim {self.dim}: expected --model.n_heads {self.n_heads} heads of {channels} channels, the sum of "
            f"--model.axes_dims, which are {self.n_heads * channels}",
        )

    @property
    def head_dim(self) -> int:
        """Channels of an attention head."""
        return sum(self.axes_dims)

    @property
    def smallest_factor(self) -> int:
        """Required divisor of the height and width of the latents."""
        return PATCH

    @property
    def conditions(self) -> Mapping[str, Shape]:
        """Embeddings of the tokens, and those that belong to the caption."""
        return {"context": (self.caption_tokens, self.cap_feat_dim), "context_mask": (self.caption_tokens,)}
