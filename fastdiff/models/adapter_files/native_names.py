"""Native names: how the layers of diffusers' networks are called, and laid out, in their original checkpoints.

ComfyUI has the networks in this layout. A table has only what differs: a layer that no row names is the same in both.
In a name ``#`` stands for a number.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.models.build import build_model
from fastdiff.models.family import family_of
from fastdiff.models.unet.original_names import original_layer

Layers = Mapping[str, tuple[int, ...]]
"""Shape of the weight of each linear layer and convolution, by its name in diffusers."""


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """A layer of the original checkpoint."""

    name: str
    parts: tuple[str, ...]
    """The layers of diffusers whose outputs it has, one after another."""
    swapped: bool = False
    """Whether the halves of its outputs (shift, scale) are the other way round in diffusers (scale, shift)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedNetwork:
    """The layers of a network by their names in diffusers and in its original checkpoint."""

    title: str
    """For messages, with an article."""
    diffusers_class: str
    part: str
    """Name of the network in pipelines of diffusers."""
    layers: Layers
    natives: tuple[NativeLayer, ...]
    """Empty: no original checkpoint is known."""

    def rows(self, native: NativeLayer) -> list[int]:
        """Return the outputs of each part of a layer."""
        return [self.layers[part][0] for part in native.parts]


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeNames:
    """Table of the layers that differ from diffusers'."""

    rows: Mapping[str, tuple[str, ...]]
    """The layers of diffusers by the native one that has their outputs."""
    swapped: tuple[str, ...] = ()
    """Layers of diffusers with the halves swapped."""
    swapped_in_last_block: tuple[str, ...] = ()
    """The same, of the block with the highest number alone."""

    def of(self, layers: Layers) -> tuple[NativeLayer, ...]:
        """Return the native layers of a network."""
        named: dict[str, NativeLayer] = {}
        swapped = self._swapped(layers)
        for layer in layers:
            name, parts = self._row(layer)
            named.setdefault(name, NativeLayer(name, parts, parts[0] in swapped))
        return tuple(named.values())

    def _row(self, layer: str) -> tuple[str, tuple[str, ...]]:
        number = next(iter(re.findall(r"(?<=\.)\d+(?=\.)", layer)), "")
        pattern = layer.replace(f".{number}.", ".#.", 1) if number else layer
        for native, parts in self.rows.items():
            if pattern in parts:
                return native.replace("#", number), tuple(part.replace("#", number) for part in parts)
        return layer, (layer,)

    def _swapped(self, layers: Layers) -> set[str]:
        found = {layer for layer in layers if layer in self.swapped}
        for pattern in self.swapped_in_last_block:
            blocks = [layer for layer in layers if re.fullmatch(re.escape(pattern).replace(r"\#", r"\d+"), layer)]
            found |= set(sorted(blocks, key=lambda layer: int(layer.split(".")[1]))[-1:])
        return found


def _qkv(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.replace("@", letter) for letter in "qkv")


FLUX2 = NativeNames(
    rows={
        "double_blocks.#.img_attn.qkv": _qkv("transformer_blocks.#.attn.to_@"),
        "double_blocks.#.img_attn.proj": ("transformer_blocks.#.attn.to_out.0",),
        "double_blocks.#.img_mlp.0": ("transformer_blocks.#.ff.linear_in",),
        "double_blocks.#.img_mlp.2": ("transformer_blocks.#.ff.linear_out",),
        "double_blocks.#.txt_attn.qkv": _qkv("transformer_blocks.#.attn.add_@_proj"),
        "double_blocks.#.txt_attn.proj": ("transformer_blocks.#.attn.to_add_out",),
        "double_blocks.#.txt_mlp.0": ("transformer_blocks.#.ff_context.linear_in",),
        "double_blocks.#.txt_mlp.2": ("transformer_blocks.#.ff_context.linear_out",),
        "single_blocks.#.linear1": ("single_transformer_blocks.#.attn.to_qkv_mlp_proj",),
        "single_blocks.#.linear2": ("single_transformer_blocks.#.attn.to_out",),
        "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
        "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
        "single_stream_modulation.lin": ("single_stream_modulation.linear",),
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
        "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
        "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
        "guidance_in.out_layer": ("time_guidance_embed.guidance_embedder.linear_2",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
        "final_layer.linear": ("proj_out",),
    },
    swapped=("norm_out.linear",),
)
_Z_IMAGE_BLOCKS = ("layers", "noise_refiner", "context_refiner")
Z_IMAGE = NativeNames(
    rows={
        **{f"{blocks}.#.attention.qkv": _qkv(f"{blocks}.#.attention.to_@") for blocks in _Z_IMAGE_BLOCKS},
        **{f"{blocks}.#.attention.out": (f"{blocks}.#.attention.to_out.0",) for blocks in _Z_IMAGE_BLOCKS},
        "x_embedder": ("all_x_embedder.2-1",),
        "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
        "final_layer.linear": ("all_final_layer.2-1.linear",),
    },
)
SD3 = NativeNames(
    rows={
        "joint_blocks.#.x_block.attn.qkv": _qkv("transformer_blocks.#.attn.to_@"),
        "joint_blocks.#.x_block.attn.proj": ("transformer_blocks.#.attn.to_out.0",),
        "joint_blocks.#.x_block.attn2.qkv": _qkv("transformer_blocks.#.attn2.to_@"),
        "joint_blocks.#.x_block.attn2.proj": ("transformer_blocks.#.attn2.to_out.0",),
        "joint_blocks.#.x_block.mlp.fc1": ("transformer_blocks.#.ff.net.0.proj",),
        "joint_blocks.#.x_block.mlp.fc2": ("transformer_blocks.#.ff.net.2",),
        "joint_blocks.#.x_block.adaLN_modulation.1": ("transformer_blocks.#.norm1.linear",),
        "joint_blocks.#.context_block.attn.qkv": _qkv("transformer_blocks.#.attn.add_@_proj"),
        "joint_blocks.#.context_block.attn.proj": ("transformer_blocks.#.attn.to_add_out",),
        "joint_blocks.#.context_block.mlp.fc1": ("transformer_blocks.#.ff_context.net.0.proj",),
        "joint_blocks.#.context_block.mlp.fc2": ("transformer_blocks.#.ff_context.net.2",),
        "joint_blocks.#.context_block.adaLN_modulation.1": ("transformer_blocks.#.norm1_context.linear",),
        "x_embedder.proj": ("pos_embed.proj",),
        "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
        "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
        "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
        "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
        "final_layer.linear": ("proj_out",),
    },
    swapped=("norm_out.linear",),
    swapped_in_last_block=("transformer_blocks.#.norm1_context.linear",),
)
QWEN_IMAGE = NativeNames(rows={})

TABLES: Mapping[str, NativeNames] = {
    "Flux2Transformer2DModel": FLUX2,
    "ZImageTransformer2DModel": Z_IMAGE,
    "SD3Transformer2DModel": SD3,
    "QwenImageTransformer2DModel": QWEN_IMAGE,
}
"""By the class in diffusers."""


def _of_table(table: NativeNames) -> Callable[[ModelConfig, Layers], tuple[NativeLayer, ...]]:
    return lambda model, layers: table.of(layers)


def _of_unet(model: ModelConfig, layers: Layers) -> tuple[NativeLayer, ...]:
    return tuple(NativeLayer(original_layer(layer, cast(UNetConfig, model)), (layer,)) for layer in layers)


_NAMES: Mapping[str, Callable[[ModelConfig, Layers], tuple[NativeLayer, ...]]] = {
    "UNet2DConditionModel": _of_unet,
    **{kind: _of_table(table) for kind, table in TABLES.items()},
}


def named_network(model: ModelConfig) -> NamedNetwork:
    """Return the layers of a network that an adapter can change, with their names; it is built on ``meta``."""
    with torch.device("meta"):
        return with_names(model, layers_of(build_model(model)))


def with_names(model: ModelConfig, layers: Layers) -> NamedNetwork:
    """Return the layers of a network with their names."""
    kind, part = model.diffusers_class, family_of(model).pipeline_part
    natives = _NAMES[kind](model, layers) if kind in _NAMES else ()
    return NamedNetwork(title=model.title, diffusers_class=kind, part=part, layers=layers, natives=natives)


def layers_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the layers of a module."""
    return {
        name: tuple(module.weight.shape)
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }
