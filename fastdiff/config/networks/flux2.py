"""Shape of Flux.2-klein's transformer (Black Forest Labs 2026). This module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastdiff.conditions import Shape
from fastdiff.config.networks.diffusers_transformer import DiffusersTransformerConfig
from fastdiff.config.sections.objective import FlowConvention


@dataclass(frozen=True, kw_only=True, slots=True)
class Flux2Config(DiffusersTransformerConfig):
    """Flux.2-klein: blocks of two streams, then blocks of one stream; the default is the 4B. Patches are latents."""

    kind: Literal["flux2"] = "flux2"
    """Kind of the network; not to be changed."""
    channels: int = 128
    """Channels of the latents, which hold 2 x 2 patches already (in_channels in diffusers' configurations)."""
    size: int = 64
    """Default height and width of sampled latents, a sixteenth of those of the image; the network takes any size."""
    num_layers: int = 5
    """Number of blocks of two streams (8 in the 9B)."""
    num_single_layers: int = 20
    """Number of blocks of one stream (24 in the 9B)."""
    attention_head_dim: int = 128
    """Channels of an attention head."""
    num_attention_heads: int = 24
    """Attention heads (32 in the 9B)."""
    joint_attention_dim: int = 7680
    """Width of the text embeddings: three layers of the text encoder (12288 in the 9B)."""
    timestep_guidance_channels: int = 256
    """Features of the time."""
    mlp_ratio: float = 3.0
    """Width of the gated MLP relative to the width of a token."""
    axes_dims_rope: tuple[int, ...] = (32, 32, 32, 32)
    """Channels of a head that each axis rotates: image number, row, column, text position."""
    rope_theta: int = 2000
    """Base of the rotary frequencies."""
    eps: float = 1e-6
    """Added to variances in norms."""
    caption_tokens: int = 512
    """Length of a caption, by which operations are counted. It has no mask: padding is read as text is."""
    references: int = 0
    """Pictures that each picture refers to, as tokens behind its own; 0: as many as the data set has."""

    family: ClassVar[str] = "fastdiff.models.transformers.flux2:FLUX2"
    title: ClassVar[str] = "a Flux.2"
    flow_convention: ClassVar[FlowConvention] = "repa"
    lora_targets: ClassVar[tuple[str, ...]] = ("to_k", "to_q", "to_v", "to_out.0", "to_qkv_mlp_proj", "attn.to_out")
    diffusers_class: ClassVar[str] = "Flux2Transformer2DModel"
    text_fields: ClassVar[Mapping[str, str]] = {"context": "joint_attention_dim"}
    text_length: ClassVar[str] = "caption_tokens"
    takes_references: ClassVar[bool] = True
    undescribed: ClassVar[tuple[str, ...]] = (*DiffusersTransformerConfig.undescribed, "references")
    fixed: ClassVar[Mapping[str, Any]] = {"patch_size": 1, "out_channels": None, "guidance_embeds": False}

    @property
    def head_dim(self) -> int:
        """Channels of an attention head."""
        return self.attention_head_dim

    @property
    def conditions(self) -> Mapping[str, Shape]:
        """Embeddings of the tokens of the caption and of its padding, and latents of references."""
        found: dict[str, Shape] = {"context": (self.caption_tokens, self.joint_attention_dim)}
        if self.references:
            found["reference"] = self.references, self.channels, self.size, self.size
        return found
