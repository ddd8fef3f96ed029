"""Shape of Stable Diffusion's UNet, and its conversion from and to diffusers' config.json. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from fastdiff.conditions import Shape
from fastdiff.config.networks.pretrained import CAPTION_TOKENS
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True, slots=True)
class UNetConfig(ModelConfig):
    """The UNet of Stable Diffusion 1.x, 2.x and XL; tuples have one entry per level, the finest first.

    Rombach et al. 2022, arXiv:2112.10752; Podell et al. 2023, arXiv:2307.01952.
    """

    kind: Literal["unet"] = "unet"
    """Kind of the network; not to be changed."""
    channels: int = 4
    """Channels of the latents."""
    size: int = 64
    """Default height and width of sampled latents; the network takes any size."""
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    """Channels of each level."""
    layers_per_block: int = 2
    """Residual blocks of each level of the encoder; the decoder has one more per level."""
    attention_heads: tuple[int, ...] = (8, 8, 8, 8)
    """Attention heads of each level (attention_head_dim in diffusers' configurations)."""
    transformer_layers: tuple[int, ...] = (1, 1, 1, 0)
    """Transformer blocks after each residual block; 0: the level has no attention."""
    mid_transformer_layers: int = 1
    """Transformer blocks in the middle block."""
    cross_attention_dim: int = 768
    """Width of the text embeddings."""
    use_linear_projection: bool = False
    """Linear layers instead of 1x1 convolutions around the transformer blocks (SD 2.x, XL)."""
    pooled_dim: int = 0
    """Width of the pooled text embedding, which is used together with the image sizes (XL); 0: neither."""
    addition_time_embed_dim: int = 256
    """Number of sinusoids per image size (XL)."""
    norm_num_groups: int = 32
    """Groups of every group normalisation."""
    upcast_attention: bool = False
    """Flag for diffusers, which then computes attention in fp32; fastdiff's softmax is always fp32."""

    family: ClassVar[str] = "fastdiff.models.unet.family:UNET"
    title: ClassVar[str] = "a UNet of Stable Diffusion"
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    any_size: ClassVar[bool] = True
    diffusers_class: ClassVar[str] = "UNet2DConditionModel"
    text_fields: ClassVar[Mapping[str, str]] = {"context": "cross_attention_dim", "pooled": "pooled_dim"}

    def __post_init__(self) -> None:
        for name in (
            "channels", "size", "layers_per_block", "mid_transformer_layers", "cross_attention_dim",
            "addition_time_embed_dim", "norm_num_groups",
        ):  # fmt: skip
            require(getattr(self, name) >= 1, f"--model.{name} {getattr(self, name)}: at least 1")
        levels = len(self.block_out_channels)
        for name, least in (("attention_heads", 1), ("transformer_layers", 0)):
            values = getattr(self, name)
            require(
                len(values) == levels and min(values) >= least,
                f"--model.{name} {values}: one entry of {least} or more for each of the {levels} of "
                "--model.block_out_channels",
            )
        for width, heads in zip(self.block_out_channels, self.attention_heads, strict=True):
            require(
                width % self.norm_num_groups == 0 and width % heads == 0,
                f"--model.block_out_channels {self.block_out_channels}: {width} must be divisible by "
                f"--model.norm_num_groups {self.norm_num_groups} and by its attention heads {heads}",
            )
        require(
            self.block_out_channels[0] % 2 == 0 and self.addition_time_embed_dim % 2 == 0,
            f"--model.block_out_channels {self.block_out_channels} and --model.addition_time_embed_dim "
            f"{self.addition_time_embed_dim}: the first width and this must be even (half sines, half cosines)",
        )
        require(
            self.transformer_layers[-1] in (0, self.mid_transformer_layers),
            f"--model.transformer_layers {self.transformer_layers}: the last is 0 or that of the middle block, "
            f"--model.mid_transformer_layers {self.mid_transformer_layers}",
        )
        require(
            self.size % self.smallest_factor == 0,
            f"--model.size {self.size} must be divisible by {self.smallest_factor}, because the UNet halves it "
            f"{levels - 1} times",
        )

    @property
    def smallest_factor(self) -> int:
        """Required divisor of the height and width of the latents."""
        return int(2 ** (len(self.block_out_channels) - 1))

    @property
    def conditions(self) -> Mapping[str, Shape]:
        """Embeddings of the tokens and, for SDXL, that of the whole caption and the sizes of the image."""
        sdxl: dict[str, Shape] = {"pooled": (self.pooled_dim,), "time_ids": (6,)} if self.pooled_dim else {}
        return {"context": (CAPTION_TOKENS, self.cross_attention_dim), **sdxl}

    def at_size(self, height: int, width: int) -> Self:
        """Return the configuration for a square of about the same area."""
        factor = self.smallest_factor
        return replace(self, size=factor * max(1, round(math.sqrt(height * width) / factor)))

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> Self:
        """Return the configuration in ``unet/config.json``; ConfigError names an entry of no SD 1.x, 2.x or XL."""
        for key, kinds in _UNET_KINDS.items():
            if key in config and not isinstance(config[key], kinds):
                raise _refused(key, config[key], " or ".join(kind.__name__ for kind in kinds))
        _refuse_relatives(config)
        widths = config.get("block_out_channels", (320, 640, 1280, 1280))
        levels = len(widths)
        down = list(config.get("down_block_types", ["CrossAttnDownBlock2D"] * (levels - 1) + ["DownBlock2D"]))
        layers = _per_level(config.get("transformer_layers_per_block", 1), levels)
        if len(layers) != levels or any(not isinstance(n, int) for n in layers):
            raise _refused("transformer_layers_per_block", layers, "one number per level")
        if len(down) != levels:
            raise _refused("down_block_types", down, f"{levels} blocks, as many as block_out_channels")
        heads = config.get("attention_head_dim", 8)
        if not isinstance(heads, int | list | tuple):
            raise _refused("attention_head_dim", heads, "a number, or one per level")
        attends = [name == "CrossAttnDownBlock2D" for name in down]
        text_time = config.get("addition_embed_type") == "text_time"
        time_dim = config.get("addition_time_embed_dim") or 256
        pooled = int(config.get("projection_class_embeddings_input_dim") or 0) - 6 * time_dim if text_time else 0
        found = cls(
            channels=config.get("in_channels", 4),
            size=config.get("sample_size") or 64,
            block_out_channels=tuple(widths),
            layers_per_block=config.get("layers_per_block", 2),
            attention_heads=_per_level(heads, levels),
            transformer_layers=tuple(n if attend else 0 for n, attend in zip(layers, attends, strict=True)),
            mid_transformer_layers=layers[-1],
            cross_attention_dim=config.get("cross_attention_dim", 1280),
            use_linear_projection=config.get("use_linear_projection", False),
            pooled_dim=pooled,
            addition_time_embed_dim=time_dim,
            norm_num_groups=config.get("norm_num_groups", 32),
            upcast_attention=bool(config.get("upcast_attention")),
        )
        ours = found.to_diffusers()
        for key, value in config.items():
            expected = ours.get(key, _UNET_DEFAULTS.get(key))
            if not key.startswith("_") and _plain(value) != _plain(expected) and key not in _EQUIVALENT:
                raise _refused(key, value, repr(expected))
        return found

    def to_diffusers(self) -> dict[str, Any]:
        """Return the entries of diffusers' ``unet/config.json`` that describe this network."""
        attends = [layers > 0 for layers in self.transformer_layers]
        layers = [n or 1 for n in self.transformer_layers[:-1]]
        layers.append(self.transformer_layers[-1] or self.mid_transformer_layers)
        text_time: dict[str, Any] = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": self.addition_time_embed_dim,
            "projection_class_embeddings_input_dim": self.pooled_dim + 6 * self.addition_time_embed_dim,
        }
        return {
            **_UNET_DEFAULTS,
            "in_channels": self.channels,
            "out_channels": self.channels,
            "sample_size": self.size,
            "block_out_channels": list(self.block_out_channels),
            "down_block_types": ["CrossAttnDownBlock2D" if attend else "DownBlock2D" for attend in attends],
            "up_block_types": ["CrossAttnUpBlock2D" if attend else "UpBlock2D" for attend in reversed(attends)],
            "layers_per_block": self.layers_per_block,
            "attention_head_dim": list(self.attention_heads),
            "transformer_layers_per_block": layers,
            "cross_attention_dim": self.cross_attention_dim,
            "use_linear_projection": self.use_linear_projection,
            "norm_num_groups": self.norm_num_groups,
            "upcast_attention": self.upcast_attention,
            **(text_time if self.pooled_dim else {}),
        }


_UNET_DEFAULTS: dict[str, Any] = {
    "act_fn": "silu",
    "center_input_sample": False,
    "downsample_padding": 1,
    "dropout": 0.0,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "norm_eps": 1e-5,
    "only_cross_attention": False,
    "dual_cross_attention": False,
    "resnet_time_scale_shift": "default",
    "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False,
    "time_embedding_type": "positional",
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "addition_embed_type_num_heads": 64,
    "attention_type": "default",
    "class_embeddings_concat": False,
}
_EQUIVALENT = ("attention_head_dim", "transformer_layers_per_block", "sample_size", "upcast_attention")
"""Entries that have several spellings, or that do not change the network."""


_UNET_KINDS: dict[str, tuple[type, ...]] = {
    "in_channels": (int,),
    "out_channels": (int,),
    "sample_size": (int, type(None)),
    "block_out_channels": (list, tuple),
    "down_block_types": (list, tuple),
    "layers_per_block": (int,),
    "cross_attention_dim": (int,),
    "norm_num_groups": (int,),
}
"""Accepted types of the entries for which diffusers allows several."""


def _refused(key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"the UNet's config.json has {key} {value!r}, expected {expected}: fastdiff supports the UNets of "
        "Stable Diffusion 1.x, 2.x and XL"
    )


def _refuse_relatives(config: Mapping[str, Any]) -> None:
    """Refuse networks by name that resemble the supported ones."""
    inputs, outputs = config.get("in_channels", 4), config.get("out_channels", 4)
    require(
        inputs <= outputs,
        f"the UNet's config.json has in_channels {inputs} and out_channels {outputs}: the network of an inpainting "
        "pipeline (9: latents, mask and masked image) or another one that is given an image (InstructPix2Pix 8, "
        "upscaler 7, depth 5); fastdiff trains text-to-image networks, which return as many channels as they take",
    )
    heads = config.get("addition_embed_type_num_heads", 64)
    require(
        heads == 64,
        f"the UNet's config.json has addition_embed_type_num_heads {heads}: the attention heads with which "
        "addition_embed_type 'text' (DeepFloyd IF) pools the caption; fastdiff has no such network, and those of "
        "Stable Diffusion 1.x, 2.x and XL do not use the entry: remove it if addition_embed_type is not 'text'",
    )
    added = config.get("projection_class_embeddings_input_dim")
    require(
        config.get("addition_embed_type") != "text_time" or (config.get("cross_attention_dim"), added) != (1280, 2560),
        "the UNet's config.json is that of the refiner of Stable Diffusion XL (cross_attention_dim 1280, "
        "projection_class_embeddings_input_dim 2560), which is told five numbers: sizes, crop and an aesthetic score; "
        "fastdiff trains the base network, which is told six; give --pretrained.path of the base",
    )


def _per_level(value: Any, levels: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * levels


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
