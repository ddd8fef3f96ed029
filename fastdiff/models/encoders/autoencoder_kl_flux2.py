"""``AutoencoderKLFlux2`` of diffusers, the autoencoder of Flux.2: patches of latents, with a batch norm's statistics.

The pipeline gathers each 2 x 2 positions into the channels, in the order channel, row, column, and normalises with the
running statistics of the batch norm: ``(z - mean) / sqrt(var + eps)``. Both are part of the latents here, so a network
sees [4C, H/16, W/16].
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.models.encoders.family import AutoencoderFamily, LatentSpace
from fastdiff.models.pipeline_files import PipelineFiles

_MEAN, _VARIANCE = "bn.running_mean", "bn.running_var"


def _space(pipeline: PipelineFiles) -> LatentSpace:
    config = pipeline.json("vae/config.json")
    widths, (height, width) = config["block_out_channels"], config["patch_size"]
    if height != width:
        raise ValueError(f"patch_size {[height, width]} is not square")
    statistics = pipeline.tensors_named("vae", (_MEAN, _VARIANCE))
    eps = float(config["batch_norm_eps"])
    deviation = (statistics[_VARIANCE].double() + eps).sqrt()
    return LatentSpace(
        channels=int(config["latent_channels"]) * height * width,
        factor=int(2 ** (len(widths) - 1)) * height,
        shift=tuple(statistics[_MEAN].tolist()),
        scale=tuple((1 / deviation).tolist()),
        posterior=True,
        variance_eps=eps,
        pixel_channels=int(config.get("out_channels", 3)),
        values_per_pixel=int(widths[0]),
    )


def _load(pipeline: PipelineFiles, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    from diffusers import AutoencoderKLFlux2

    vae: nn.Module = pipeline.load_part(AutoencoderKLFlux2, "vae", device, dtype)
    return vae


def _encode(vae: Any, images: Tensor) -> Tensor:
    distribution, patch = vae.encode(images).latent_dist, vae.config.patch_size[0]
    parts = distribution.mean.float(), (0.5 * distribution.logvar.float()).exp()
    return torch.cat([F.pixel_unshuffle(part, patch) for part in parts], dim=1)  # 2 x [B, C, 2h, 2w] -> [B, 8C, h, w]


def _decode(vae: Any, latents: Tensor) -> Tensor:
    images: Tensor = vae.decode(F.pixel_shuffle(latents, vae.config.patch_size[0])).sample
    return images


AUTOENCODER_KL_FLUX2 = AutoencoderFamily(
    classes=("AutoencoderKLFlux2",), space=_space, load=_load, encode=_encode, decode=_decode
)
