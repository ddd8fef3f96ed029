"""Shape of the diffusion transformer (DiT), with the published sizes. This module imports no torch."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True, slots=True)
class DiTConfig(ModelConfig):
    """A diffusion transformer (Peebles & Xie 2023, arXiv:2212.09748)."""

    kind: Literal["dit"] = "dit"
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
    """Height and width of the latents."""
    classes: int = 1000
    """Number of classes, without the null class of classifier-free guidance."""
    mlp_ratio: float = 4.0
    """Width of the MLP relative to the width of a token."""
    learn_sigma: bool = False
    """Double the output channels, as in the published checkpoints; the second half predicts the variance."""

    family: ClassVar[str] = "fastdiff.models.dit.family:DIT"
    title: ClassVar[str] = "a DiT"
    lora_targets: ClassVar[tuple[str, ...]] = ("attn.qkv", "attn.proj")

    def __post_init__(self) -> None:
        for name in ("depth", "hidden", "heads", "patch", "channels", "size", "classes"):
            require(getattr(self, name) >= 1, f"--model.{name} {getattr(self, name)}: at least 1")
        require(
            1 <= self.hidden * self.mlp_ratio < math.inf,
            f"--model.mlp_ratio {self.mlp_ratio}: a number above 0; 4 is usual",
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
            self.size % self.patch == 0,
            f"--model.size {self.size} is not divisible by --model.patch {self.patch}; choose a divisor of the size of "
            "the images as the patch, or encode with another --resolution",
        )


DIT_SIZES: dict[str, tuple[int, int, int]] = {
    "S": (12, 384, 6),
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "XL": (28, 1152, 16),
}
"""Depth, hidden width and heads of the published sizes (table 1 of Peebles & Xie 2023)."""

DIT_PATCHES = (2, 4, 8)
"""Patch sides of the published models."""


def dit_config(name: str, *, size: int = 32, learn_sigma: bool = False) -> DiTConfig:
    """Return the configuration of a published size, from ``"DiT-S/2"`` to ``"DiT-XL/8"``; ConfigError for other names.

    ``size`` is height and width of the latents: 32 for images of 256 px, 64 for 512 px.
    """
    names = {f"DiT-{letter}/{patch}": (letter, patch) for letter in DIT_SIZES for patch in DIT_PATCHES}
    if name not in names:
        raise ConfigError(f"model {name!r} is unknown; choose one of {', '.join(names)}")
    letter, patch = names[name]
    depth, hidden, heads = DIT_SIZES[letter]
    return DiTConfig(depth=depth, hidden=hidden, heads=heads, patch=patch, size=size, learn_sigma=learn_sigma)
