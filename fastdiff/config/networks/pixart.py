"""Shape of the text DiT of PixArt-alpha and -Sigma, and its conversion from and to diffusers' config.json.

This module imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from fastdiff.conditions import Shape
from fastdiff.config.networks.base_width import require_heads_of_base
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError, require

MLP_RATIO = 4
"""Width of the MLP relative to the width of a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PixArtConfig(ModelConfig):
    """A diffusion transformer with cross-attention to text.

    PixArt-alpha: Chen et al. 2023, arXiv:2310.00426; PixArt-Sigma: Chen et al. 2024, arXiv:2403.04692.
    """

    kind: Literal["pixart"] = "pixart"
    """Kind of the network; not to be changed."""
    depth: int = 28
    """Number of transformer blocks."""
    hidden: int = 1152
    """Width of a token."""
    heads: int = 16
    """Attention heads."""
    patch: int = 2
    """Height and width of a patch, in latent pixels."""
    channels: int = 4
    """Channels of the latents."""
    size: int = 32
    """Default height and width of sampled latents, to which the positions refer; the network takes any size."""
    caption_dim: int = 4096
    """Width of the text embeddings (caption_channels in diffusers' configurations)."""
    caption_tokens: int = 300
    """Length of a caption, by which operations are counted; the network takes any (alpha has 120, Sigma 300)."""
    pe_interpolation: float = 1.0
    """Divisor of the positions: that of Sigma is 0.5 at 256 px, 1 at 512 px, 2 at 1024 px (interpolation_scale in
    diffusers' configurations)."""
    size_conditioning: bool = False
    """Add embeddings of the height and width of the image file and of the aspect ratio to that of the time (alpha at
    1024 px)."""
    learn_sigma: bool = False
    """Double the output channels, as in the published checkpoints; the second half predicts the variance."""
    base_width: int = 0
    """Width of the PixArt whose learning rate is given (muP, arXiv:2505.15270): that of hidden matrices is divided by
    model.hidden / model.base_width, initial weights and output are scaled to match; 0: without muP."""

    family: ClassVar[str] = "fastdiff.models.pixart.family:PIXART"
    title: ClassVar[str] = "a PixArt"
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    hidden_matrices: ClassVar[tuple[str, ...]] = (
        "to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight", "ff.net.0.proj.weight", "ff.net.2.weight",
        "linear_2.weight", "adaln_single.linear.weight",
    )  # fmt: skip
    any_size: ClassVar[bool] = True
    diffusers_class: ClassVar[str] = "PixArtTransformer2DModel"
    former_diffusers_classes: ClassVar[tuple[str, ...]] = ("Transformer2DModel",)
    diffusers_call: ClassVar[Mapping[str, bool]] = {"use_resolution_binning": False, "clean_caption": False}
    text_fields: ClassVar[Mapping[str, str]] = {"context": "caption_dim"}
    text_length: ClassVar[str] = "caption_tokens"

    def __post_init__(self) -> None:
        for name in ("depth", "hidden", "heads", "patch", "channels", "size", "caption_dim", "caption_tokens"):
            require(getattr(self, name) >= 1, f"--model.{name} {getattr(self, name)}: at least 1")
        require(
            0 < self.pe_interpolation < math.inf,
            f"--model.pe_interpolation {self.pe_interpolation}: a number above 0; 1 does not scale positions",
        )
        require(
            self.hidden % self.heads == 0,
            f"--model.hidden {self.hidden} is not divisible by --model.heads {self.heads}; "
            f"choose a multiple, for example {self.hidden // self.heads * self.heads or self.heads}",
        )
        require(
            self.hidden % 4 == 0,
            f"--model.hidden {self.hidden} must be divisible by 4 (the sin-cos position embedding)",
        )
        require(
            not self.size_conditioning or self.hidden % 3 == 0,
            f"--model.hidden {self.hidden} must be divisible by 3 with --model.size_conditioning: the embeddings of "
            "height, width and aspect ratio have a third each",
        )
        require(
            self.size % self.patch == 0,
            f"--model.size {self.size} is not divisible by --model.patch {self.patch}; choose a divisor of the size of "
            "the images as the patch, or encode with another --resolution",
        )
        require_heads_of_base(self.base_width, self.hidden, self.heads, self.hidden // self.heads)

    @property
    def smallest_factor(self) -> int:
        """Required divisor of the height and width of the latents."""
        return self.patch

    @property
    def conditions(self) -> Mapping[str, Shape]:
        """Embeddings of the tokens, those that belong to the caption and, with conditioning on it, the image's size."""
        sizes: dict[str, Shape] = {"time_ids": (6,)} if self.size_conditioning else {}
        return {"context": (self.caption_tokens, self.caption_dim), "context_mask": (self.caption_tokens,), **sizes}

    @property
    def side(self) -> int:
        """Tokens per row and column at the default size."""
        return self.size // self.patch

    @property
    def out_channels(self) -> int:
        """Channels of the output."""
        return self.channels * (2 if self.learn_sigma else 1)

    def at_size(self, height: int, width: int) -> Self:
        """Return the configuration for a square of about the same area."""
        return replace(self, size=self.patch * max(1, round(math.sqrt(height * width) / self.patch)))

    def problem_in(self, pipeline: str) -> str | None:
        """Return why pipelines of this class of diffusers cannot draw with the network, or None."""
        if not self.size_conditioning or _SIZED.get(pipeline) == self.size:
            return None
        name, size = next(iter(_SIZED.items()))
        return (
            f"the network takes the sizes of images (--model.size_conditioning) and its latents are {self.size} x "
            f"{self.size}, but of the pipelines of diffusers only {name} passes sizes, and only if latents are {size} "
            f"x {size}"
        )

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> Self:
        """Return the configuration in ``transformer/config.json``; ConfigError names an entry of no PixArt."""
        known = {**_USUAL, **config}
        if (norm := known["norm_type"]) != "ada_norm_single":
            raise _refused("norm_type", norm, "'ada_norm_single'")
        for name in _NUMBERS:
            if not isinstance(known[name], int) or isinstance(known[name], bool):
                raise _refused(name, known[name], "an integer")
        size, channels = known["sample_size"], known["in_channels"]
        outputs = channels if known["out_channels"] is None else known["out_channels"]
        if outputs not in (channels, 2 * channels):
            raise _refused("out_channels", outputs, f"in_channels {channels}, or twice as many")
        scale, sizes = known["interpolation_scale"], known["use_additional_conditions"]
        found = cls(
            depth=known["num_layers"],
            hidden=known["num_attention_heads"] * known["attention_head_dim"],
            heads=known["num_attention_heads"],
            patch=known["patch_size"],
            channels=channels,
            size=size,
            caption_dim=known["caption_channels"],
            # As diffusers' class sets them.
            pe_interpolation=float(max(size // 64, 1) if scale is None else scale),
            size_conditioning=size == 128 if sizes is None else bool(sizes),
            learn_sigma=outputs == 2 * channels,
        )
        expected = _OF_FORMER_CLASS | found.to_diffusers()
        for key, value in config.items():
            if not key.startswith("_") and key not in _EQUIVALENT and value != expected.get(key):
                raise _refused(key, value, repr(expected.get(key)))
        return found

    def to_diffusers(self) -> dict[str, Any]:
        """Return the entries of diffusers' ``transformer/config.json`` that describe this network."""
        return {
            **_FIXED,
            "num_attention_heads": self.heads,
            "attention_head_dim": self.hidden // self.heads,
            "in_channels": self.channels,
            "out_channels": self.out_channels,
            "num_layers": self.depth,
            "cross_attention_dim": self.hidden,
            "sample_size": self.size,
            "patch_size": self.patch,
            "interpolation_scale": self.pe_interpolation,
            "use_additional_conditions": self.size_conditioning,
            "caption_channels": self.caption_dim,
        }


_SIZED = {"PixArtAlphaPipeline": 128}
"""Pipelines of diffusers that pass the sizes of images to a network, and the size of the latents at which they do."""
_FIXED: dict[str, Any] = {
    "dropout": 0.0,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "attention_type": "default",
}
"""Entries that every PixArt has."""
_USUAL: dict[str, Any] = {
    **_FIXED,
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "sample_size": 128,
    "patch_size": 2,
    "interpolation_scale": None,
    "use_additional_conditions": None,
    "caption_channels": None,
}
"""Defaults of diffusers' class."""
_NUMBERS = (
    "num_attention_heads", "attention_head_dim", "in_channels", "num_layers", "sample_size", "patch_size",
    "caption_channels",
)  # fmt: skip
_OF_FORMER_CLASS: dict[str, Any] = {
    "double_self_attention": False,
    "only_cross_attention": False,
    "use_linear_projection": False,
    "num_vector_embeds": None,
}
"""Further entries of published configurations."""
_EQUIVALENT = (
    "out_channels", "interpolation_scale", "use_additional_conditions", "norm_num_groups", "upcast_attention",
    "num_embeds_ada_norm",
)  # fmt: skip
"""Entries with several spellings, and those that do not change the network."""


def _refused(key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"the transformer's config.json has {key} {value!r}, expected {expected}: fastdiff supports the transformers "
        "of PixArt-alpha and PixArt-Sigma"
    )
