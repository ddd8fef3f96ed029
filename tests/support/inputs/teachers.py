"""Tiny vision models of transformers with random weights, as teachers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

WIDTH = 32
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_VIT: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
_TWO_TOWERS: dict[str, Any] = {**_VIT, "intermediate_size": 64, "image_size": 32, "patch_size": 8}


def _dinov2() -> Any:
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(**_VIT, image_size=28, patch_size=14))


def _dinov2_registers() -> Any:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    return Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**_VIT, image_size=28, patch_size=14))


def _dinov3() -> Any:
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    return DINOv3ViTModel(DINOv3ViTConfig(**_VIT, intermediate_size=64, patch_size=16, num_register_tokens=4))


def _siglip() -> Any:
    from transformers import SiglipConfig, SiglipModel

    text = {**_VIT, "intermediate_size": 64, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return SiglipModel(SiglipConfig(vision_config=_TWO_TOWERS, text_config=text))


def _clip() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(**_TWO_TOWERS))


def _resnet() -> Any:
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[16, WIDTH], depths=[1, 1], layer_type="basic"))


TEACHERS: Mapping[str, tuple[Callable[[], Any], int, int]] = {
    "dinov2": (_dinov2, 14, 1),
    "dinov2-registers": (_dinov2_registers, 14, 5),
    "dinov3": (_dinov3, 16, 5),
    "siglip": (_siglip, 8, 0),
    "clip": (_clip, 8, 1),
    "resnet": (_resnet, 8, 0),
}
"""Function that builds it, pixels per side of a patch, and tokens before those of the patches, by name."""


def tiny_teacher(folder: Path, name: str) -> Path:
    """Write a teacher with its processor and return the folder; all have features of ``WIDTH`` numbers."""
    from transformers import CLIPImageProcessor

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        TEACHERS[name][0]().save_pretrained(folder)
    CLIPImageProcessor(image_mean=list(MEAN), image_std=list(DEVIATION)).save_pretrained(folder)
    return folder
