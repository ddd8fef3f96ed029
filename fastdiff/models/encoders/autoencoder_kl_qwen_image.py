"""``AutoencoderKLQwenImage`` of diffusers, the autoencoder of Qwen-Image: one of videos, given a single frame.

Images become ``[B, 3, 1, H, W]`` and latents ``[B, C, 1, h, w]``; x0 is ``(z - latents_mean) / latents_std``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.models.encoders.family import AutoencoderFamily, LatentSpace
from fastdiff.models.pipeline_files import PipelineFiles

_FRAMES = 3
"""Frames of an activation, two of them zeros in front of the image: its convolutions look back in time."""


def _space(pipeline: PipelineFiles) -> LatentSpace:
    config = pipeline.json("vae/config.json")
    return LatentSpace(
        channels=int(config["z_dim"]),
        factor=int(2 ** len(config["temperal_downsample"])),
        shift=tuple(float(mean) for mean in config["latents_mean"]),
        scale=tuple(1 / float(std) for std in config["latents_std"]),
        posterior=True,
        pixel_channels=int(config.get("input_channels", 3)),
        values_per_pixel=_FRAMES * int(config["base_dim"]),
    )


def _load(pipeline: PipelineFiles, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    from diffusers import AutoencoderKLQwenImage

    vae: nn.Module = pipeline.load_part(AutoencoderKLQwenImage, "vae", device, dtype)
    return vae


def _encode(vae: Any, images: Tensor) -> Tensor:
    distribution = vae.encode(images.unsqueeze(2)).latent_dist
    deviation = (0.5 * distribution.logvar.float()).exp()
    return torch.cat([distribution.mean.float(), deviation], dim=1).squeeze(2)  # [B, 2C, 1, h, w] -> [B, 2C, h, w]


def _decode(vae: Any, latents: Tensor) -> Tensor:
    images: Tensor = vae.decode(latents.unsqueeze(2)).sample
    return images.squeeze(2)


AUTOENCODER_KL_QWEN_IMAGE = AutoencoderFamily(
    classes=("AutoencoderKLQwenImage",), space=_space, load=_load, encode=_encode, decode=_decode
)
