"""``AutoencoderDC`` of diffusers: the deep compression autoencoder (Chen et al. 2024, arXiv:2410.10733), as in Sana."""

from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.models.encoders.family import AutoencoderFamily, LatentSpace
from fastdiff.models.pipeline_files import PipelineFiles


def _space(pipeline: PipelineFiles) -> LatentSpace:
    """Return the space of its latents, which have no posterior; x0 is ``z * scaling_factor``."""
    config = pipeline.json("vae/config.json")
    channels, widths = int(config["latent_channels"]), config["encoder_block_out_channels"]
    return LatentSpace(
        channels=channels,
        factor=int(2 ** (len(widths) - 1)),
        shift=(0.0,) * channels,
        scale=(float(config["scaling_factor"]),) * channels,
        pixel_channels=int(config.get("in_channels", 3)),
        values_per_pixel=int(widths[0]),
    )


def _load(pipeline: PipelineFiles, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    from diffusers import AutoencoderDC

    vae: nn.Module = pipeline.load_part(AutoencoderDC, "vae", device, dtype)
    return vae


def _encode(vae: Any, images: Tensor) -> Tensor:
    latents: Tensor = vae.encode(images).latent
    return latents.float()


def _decode(vae: Any, latents: Tensor) -> Tensor:
    images: Tensor = vae.decode(latents).sample
    return images


AUTOENCODER_DC = AutoencoderFamily(classes=("AutoencoderDC",), space=_space, load=_load, encode=_encode, decode=_decode)
