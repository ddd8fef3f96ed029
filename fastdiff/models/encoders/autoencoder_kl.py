"""``AutoencoderKL`` of diffusers: the autoencoder of Stable Diffusion (Rombach et al. 2022, arXiv:2112.10752)."""

from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.models.encoders.family import AutoencoderFamily, LatentSpace
from fastdiff.models.pipeline_files import PipelineFiles

_SCALING_FACTOR = 0.18215
"""Default of the class, for older configurations without the field."""


def _space(pipeline: PipelineFiles) -> LatentSpace:
    """Return the space of its posteriors.

    x0 is ``(mean - shift_factor) * scaling_factor``. If there are ``latents_mean`` and ``latents_std`` per channel, x0
    is ``(mean - latents_mean) * scaling_factor / latents_std``. With neither of them and a ``scaling_factor`` of null
    it has no statistics, as in a conversion whose recipe measures them.
    """
    config = pipeline.json("vae/config.json")
    channels, widths = int(config.get("latent_channels", 4)), config.get("block_out_channels", (64,))
    factor, means, deviations = (config.get(name) for name in ("scaling_factor", "latents_mean", "latents_std"))
    scaling = float(factor or (1.0 if "scaling_factor" in config else _SCALING_FACTOR))
    known = channels if factor is not None or "scaling_factor" not in config else 0
    shift, scale = [float(config.get("shift_factor") or 0.0)] * known, [scaling] * known
    if means is not None and deviations is not None:
        shift, scale = [float(mean) for mean in means], [scaling / float(std) for std in deviations]
    return LatentSpace(
        channels=channels,
        factor=int(2 ** (len(widths) - 1)),
        shift=tuple(shift),
        scale=tuple(scale),
        posterior=True,
        pixel_channels=int(config.get("out_channels", 3)),
        values_per_pixel=int(widths[0]),
    )


def _load(pipeline: PipelineFiles, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    from diffusers import AutoencoderKL

    # Activations of SDXL's autoencoder exceed the range of fp16, and its configuration says so.
    upcast = dtype == torch.float16 and bool(pipeline.json("vae/config.json").get("force_upcast"))
    vae: nn.Module = pipeline.load_part(AutoencoderKL, "vae", device, torch.float32 if upcast else dtype)
    return vae


def _encode(vae: Any, images: Tensor) -> Tensor:
    distribution = vae.encode(images).latent_dist
    deviation = (0.5 * distribution.logvar.float()).exp()
    return torch.cat([distribution.mean.float(), deviation], dim=1)  # 2 x [B, C, h, w] -> [B, 2C, h, w]


def _decode(vae: Any, latents: Tensor) -> Tensor:
    decoded: Tensor = vae.decode(latents).sample
    return decoded


AUTOENCODER_KL = AutoencoderFamily(classes=("AutoencoderKL",), space=_space, load=_load, encode=_encode, decode=_decode)
