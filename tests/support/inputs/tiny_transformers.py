"""Tiny transformers of diffusers with random weights, their layers by all names, and adapters of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.models.adapter_files.low_rank import LowRank
from fastdiff.models.adapter_files.native_names import TABLES, NamedNetwork, layers_of, named_network
from fastdiff.models.pretrained.tiny_pipeline import UNETS

_HEADS: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2, "num_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "Flux2Transformer2DModel": {
        **_HEADS, "num_single_layers": 2, "in_channels": 16, "joint_attention_dim": 24, "guidance_embeds": False,
        "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4),
    },
    "ZImageTransformer2DModel": {
        "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 24,
        "axes_dims": [8, 12, 12], "axes_lens": [64, 64, 64],
    },
    "SD3Transformer2DModel": {
        **_HEADS, "num_layers": 12, "joint_attention_dim": 32, "caption_projection_dim": 32,
        "pooled_projection_dim": 16, "dual_attention_layers": (0,), "sample_size": 16, "in_channels": 4,
        "out_channels": 4, "pos_embed_max_size": 16,
    },
    "QwenImageTransformer2DModel": {
        **_HEADS, "joint_attention_dim": 24, "in_channels": 16, "out_channels": 4, "axes_dims_rope": (4, 6, 6),
    },
}  # fmt: skip
"""By class; more than ten blocks of SD3, whose last one has a number that sorts before that of the third."""
_PIPELINES = {
    "Flux2Transformer2DModel": "Flux2KleinPipeline",
    "ZImageTransformer2DModel": "ZImagePipeline",
    "SD3Transformer2DModel": "StableDiffusion3Pipeline",
    "QwenImageTransformer2DModel": "QwenImagePipeline",
    "UNet2DConditionModel": "StableDiffusionXLPipeline",
}
UNET_KINDS = {"sd15": UNETS["sd15"], "sdxl": UNETS["sdxl"]}
NETWORKS = (*CONFIGS, *UNET_KINDS)


def transformer(kind: str) -> Any:
    """Return a network of diffusers."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if kind in UNET_KINDS:
            return diffusers.UNet2DConditionModel(**UNET_KINDS[kind].to_diffusers())
        return getattr(diffusers, kind)(**CONFIGS[kind])


def class_of(kind: str) -> str:
    """Return the class of ``transformer``."""
    return "UNet2DConditionModel" if kind in UNET_KINDS else kind


def network(kind: str) -> NamedNetwork:
    """Return the layers of ``transformer``."""
    if kind in UNET_KINDS:
        return named_network(UNET_KINDS[kind])
    layers = layers_of(transformer(kind))
    natives = TABLES[kind].of(layers)
    return NamedNetwork(title="a tiny one", diffusers_class=kind, part="transformer", layers=layers, natives=natives)


def changes_in_diffusers(model: Any, file: Path) -> dict[str, Tensor]:
    """Return what diffusers adds to the weight of each layer, after ``load_lora_weights`` of the network's pipeline."""
    import diffusers

    cls = getattr(diffusers, _PIPELINES[type(model).__name__])
    parts, part = set(cls._get_signature_keys(cls)[0]), "unet" if hasattr(cls, "unet_name") else "transformer"
    pipeline = cls(**dict.fromkeys(parts - {part}), **{part: model})
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    one = {name: getattr(module, "lora_A", None) or module._available_adapters for name, module in adapted.items()}
    return {name: module.get_delta_weight(*one[name]) for name, module in adapted.items()}


def adapter(names: NamedNetwork, rank: int, alpha: float, layers: Iterable[str] | None = None) -> dict[str, LowRank]:
    """Return a random adapter of every layer, or of some."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for layer in names.layers if layers is None else layers:
        outputs, *inputs = names.layers[layer]
        down = torch.randn(rank, *inputs, generator=generator)
        up = torch.randn(outputs, rank, *[1] * (len(inputs) - 1), generator=generator)
        found[layer] = LowRank(down, up, alpha)
    return found


def in_native_layout(names: NamedNetwork, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of layers, such as weights, as the original checkpoint has them; one that is missing is 0."""
    found = {}
    for native in names.natives:
        known = next((values[part] for part in native.parts if part in values), None)
        if known is None:
            continue
        parts = [values.get(part, torch.zeros(names.layers[part][0], *known.shape[1:])) for part in native.parts]
        whole = torch.cat(parts)
        scale, shift = whole.chunk(2)
        found[native.name] = torch.cat([shift, scale]) if native.swapped else whole
    return found
