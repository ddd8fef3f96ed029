"""Shape of Stable Diffusion 3's transformer (Esser et al. 2024, arXiv:2403.03206). This module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastdiff.conditions import Shape
from fastdiff.config.networks.diffusers_transformer import DiffusersTransformerConfig
from fastdiff.config.sections.objective import FlowConvention
from fastdiff.errors import require


@dataclass(frozen=True, kw_only=True, slots=True)
class SD3Config(DiffusersTransformerConfig):
    """Stable Diffusion 3: blocks of two streams with joint attention; the default is 3.5 medium."""

    kind: Literal["sd3"] = "sd3"
    """Kind of the network; not to be changed."""
    channels: int = 16
    """Channels of the latents (in_channels in diffusers' configurations)."""
    size: int = 128
    """Default height and width of sampled latents, an eighth of those of the image, to which the positions refer
    (sample_size in diffusers' configurations); the network takes any size up to that of the table of positions."""
    patch_size: int = 2
    """Height and width of a patch, in latent pixels."""
    num_layers: int = 24
    """Number of blocks (38 in 3.5 large)."""
    attention_head_dim: int = 64
    """Channels of an attention head."""
    num_attention_heads: int = 24
    """Attention heads (38 in 3.5 large)."""
    joint_attention_dim: int = 4096
    """Width of the text embeddings."""
    caption_projection_dim: int = 1536
    """Width of a token: that of all heads (2432 in 3.5 large)."""
    pooled_projection_dim: int = 2048
    """Width of the embedding of the whole caption."""
    pos_embed_max_size: int = 384
    """Patches per row and column of the table of positions, which is cropped from its centre (192 in 3.5 large)."""
    dual_attention_layers: tuple[int, ...] = tuple(range(13))
    """Blocks, counted from 0, with a second attention among the patches alone (none in 3.5 large)."""
    qk_norm: Literal["rms_norm"] | None = "rms_norm"
    """Norm of queries and keys (None in 3.0)."""
    caption_tokens: int = 333
    """Length of a caption, by which operations are counted: 77 tokens of CLIP and 256 of T5. It has no mask."""

    family: ClassVar[str] = "fastdiff.models.transformers.sd3:SD3"
    title: ClassVar[str] = "a Stable Diffusion 3"
    flow_convention: ClassVar[FlowConvention] = "sd3"
    lora_targets: ClassVar[tuple[str, ...]] = (
        *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"),
        *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    diffusers_class: ClassVar[str] = "SD3Transformer2DModel"
    text_fields: ClassVar[Mapping[str, str]] = {"context": "joint_attention_dim", "pooled": "pooled_projection_dim"}
    undescribed: ClassVar[tuple[str, ...]] = ("caption_tokens",)
    renamed: ClassVar[Mapping[str, str]] = {"channels": "in_channels", "size": "sample_size"}
    from_zero: ClassVar[tuple[str, ...]] = ("dual_attention_layers",)

    def __post_init__(self) -> None:
        # Not super(): slots make a new class, which the method does not know.
        DiffusersTransformerConfig.__post_init__(self)
        width = self.num_attention_heads * self.attention_head_dim
        require(
            self.caption_projection_dim == width,
            f"--model.caption_projection_dim {self.caption_projection_dim}: expected {width}, the width of "
            f"--model.num_attention_heads {self.num_attention_heads} of {self.attention_head_dim} channels",
        )
        require(
            all(layer < self.num_layers for layer in self.dual_attention_layers),
            f"--model.dual_attention_layers {self.dual_attention_layers}: below {self.num_layers}, --model.num_layers",
        )
        self.require_positions(self.size, self.size)

    @property
    def head_dim(self) -> int:
        """Channels of an attention head."""
        return self.attention_head_dim

    @property
    def smallest_factor(self) -> int:
        """Required divisor of the height and width of the latents."""
        return self.patch_size

    @property
    def derived(self) -> Mapping[str, Any]:
        """Channels of the output."""
        return {"out_channels": self.channels}

    @property
    def conditions(self) -> Mapping[str, Shape]:
        """Embeddings of the tokens of the caption and of its padding, and of the whole caption."""
        return {"context": (self.caption_tokens, self.joint_attention_dim), "pooled": (self.pooled_projection_dim,)}

    def require_positions(self, height: int, width: int) -> None:
        """Raise ConfigError if the table of positions is too small for latents of this size."""
        largest = self.pos_embed_max_size * self.patch_size
        require(
            max(height, width) <= largest,
            f"latents of {height} x {width}: the table of positions of this Stable Diffusion 3 has room for {largest} "
            f"x {largest} (--model.pos_embed_max_size {self.pos_embed_max_size}); encode smaller pictures",
        )
