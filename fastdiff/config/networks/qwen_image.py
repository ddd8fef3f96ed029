"""Shape of Qwen-Image's transformer (Alibaba 2025, arXiv:2508.02324). This module imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fastdiff.conditions import Shape
from fastdiff.config.networks.diffusers_transformer import DiffusersTransformerConfig
from fastdiff.config.sections.objective import FlowConvention
from fastdiff.errors import require

PATCH = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenImageConfig(DiffusersTransformerConfig):
    """Qwen-Image: blocks of two streams, captions and patches of latents, with joint attention."""

    kind: Literal["qwen-image"] = "qwen-image"
    """Kind of the network; not to be changed."""
    channels: int = 16
    """Channels of the latents (out_channels in diffusers' configurations; in_channels counts those of a patch)."""
    size: int = 128
    """Default height and width of sampled latents, an eighth of those of the image; the network takes any even size."""
    num_layers: int = 60
    """Number of blocks."""
    attention_head_dim: int = 128
    """Channels of an attention head."""
    num_attention_heads: int = 24
    """Attention heads."""
    joint_attention_dim: int = 3584
    """Width of the text embeddings."""
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    """Channels of a head that each axis rotates: frame, row, column."""
    caption_tokens: int = 512
    """Length of a caption, by which operations are counted; the network takes any."""

    family: ClassVar[str] = "fastdiff.models.transformers.qwen_image:QWEN_IMAGE"
    title: ClassVar[str] = "a Qwen-Image"
    flow_convention: ClassVar[FlowConvention] = "repa"
    lora_targets: ClassVar[tuple[str, ...]] = ("to_k", "to_q", "to_v", "to_out.0")
    diffusers_class: ClassVar[str] = "QwenImageTransformer2DModel"
    text_fields: ClassVar[Mapping[str, str]] = {"context": "joint_attention_dim"}
    text_length: ClassVar[str] = "caption_tokens"
    renamed: ClassVar[Mapping[str, str]] = {"channels": "out_channels"}
    fixed: ClassVar[Mapping[str, Any]] = {
        "patch_size": PATCH, "guidance_embeds": False, "zero_cond_t": False, "use_additional_t_cond": False,
        "use_layer3d_rope": False,
    }  # fmt: skip
    ignored: ClassVar[tuple[str, ...]] = ("pooled_projection_dim",)  # of published files; the class has no such entry

    def __post_init__(self) -> None:
        # Not super(): slots make a new class, which the method does not know.
        DiffusersTransformerConfig.__post_init__(self)
        require(
            sum(self.axes_dims_rope) == self.attention_head_dim,
            f"--model.axes_dims_rope {' '.join(map(str, self.axes_dims_rope))}: expected a sum of "
            f"{self.attention_head_dim}, the channels of a head (--model.attention_head_dim)",
        )

    @property
    def head_dim(self) -> int:
        """Channels of an attention head."""
        return self.attention_head_dim

    @property
    def smallest_factor(self) -> int:
        """Required divisor of the height and width of the latents."""
        return PATCH

    @property
    def derived(self) -> Mapping[str, Any]:
        """Channels of a patch, which are those of the first layer."""
        return {"in_channels": PATCH**2 * self.channels}

    @property
    def conditions(self) -> Mapping[str, Shape]:
        """Embeddings of the tokens, and those that belong to the caption."""
        return {"context": (self.caption_tokens, self.joint_attention_dim), "context_mask": (self.caption_tokens,)}
