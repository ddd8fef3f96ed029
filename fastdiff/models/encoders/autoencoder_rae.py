"""``AutoencoderRAE`` of diffusers: features of a frozen DINOv2 as latents (Zheng et al. 2025, arXiv:2510.11690).

Its images are in [0, 1]. The encoder reads them resized by bicubic interpolation without antialiasing, and gives its
last hidden states without the class token and the registers. The recipe normalises each element of a latent by a mean
and a variance of its own. A decoder of its own turns features into pixels.

Encoder and decoder are called here without the statistics of the module, so that latents are stored as the encoder
gives them, and the class token comes from the same pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.conditions import TEACHER_TOKEN
from fastdiff.errors import ConfigError
from fastdiff.models.encoders.family import AutoencoderFamily, LatentSpace
from fastdiff.models.pipeline_files import PipelineFiles

_BEFORE_PATCHES = 5
"""Tokens of DINOv2 before those of the patches: the class token and four registers."""
_MEAN, _DEVIATION = "_latents_mean", "_latents_std"
_DEVIATION_EPS = 1e-5
"""Added to the standard deviation by diffusers; the authors add as much to the variance."""
_VARIANCE_EPS = 1e-5


def _space(pipeline: PipelineFiles) -> LatentSpace:
    """Return the space of its features; buffers of one element that change nothing are no statistics."""
    config = pipeline.json("vae/config.json")
    if (kind := config["encoder_type"]) != "dinov2" or not config.get("reshape_to_2d", True):
        raise ConfigError(
            f"{pipeline.folder_of('vae')} encodes with {kind}, reshape_to_2d {config.get('reshape_to_2d')}; expected "
            "dinov2 and true"
        )
    side = int(config["encoder_input_size"]) // int(config["encoder_patch_size"])
    channels, patch = int(config["encoder_hidden_size"]), int(config["patch_size"])
    shift, scale = _statistics(pipeline, (channels, side, side), float(config.get("scaling_factor", 1.0)))
    widest = max(4 * channels, int(config["decoder_intermediate_size"]))
    return LatentSpace(
        channels=channels,
        factor=patch,
        shift=shift,
        scale=scale,
        side=side,
        columns={TEACHER_TOKEN: (channels,)},
        measured_per="element",
        variance_eps=_VARIANCE_EPS,
        pixel_channels=int(config.get("num_channels", 3)),
        values_per_pixel=-(-widest // patch**2),
    )


def _statistics(
    pipeline: PipelineFiles, shape: tuple[int, int, int], scaling: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    found = pipeline.tensors_named("vae", (_MEAN, _DEVIATION))
    mean, deviation = found[_MEAN], found[_DEVIATION]
    if mean.numel() == deviation.numel() == 1 and (mean.item(), deviation.item()) == (0.0, 1.0):
        return (), ()
    whole = [_broadcast(value, shape).double() for value in (mean, deviation)]
    if all(bool((value == value[:, :1, :1]).all()) for value in whole):
        whole = [value[:, 0, 0] for value in whole]
    shift, scale = whole[0], scaling / (whole[1] + _DEVIATION_EPS)
    return tuple(shift.flatten().tolist()), tuple(scale.flatten().tolist())


def _broadcast(value: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return a buffer that diffusers broadcasts to ``[B, *shape]``, without the batch."""
    try:
        return value.reshape(value.shape[value.dim() - 3 :] if value.dim() > 3 else value.shape).broadcast_to(shape)
    except RuntimeError:
        raise ValueError(f"statistics of shape {list(value.shape)} for latents of shape {list(shape)}") from None


def _load(pipeline: PipelineFiles, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
    from diffusers import AutoencoderRAE

    rae: nn.Module = pipeline.load_part(AutoencoderRAE, "vae", device, dtype)
    return rae


def _encode(rae: Any, images: Tensor) -> Tensor:
    return _encode_columns(rae, images)[0]


def _encode_columns(rae: Any, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    side = rae.encoder_input_size
    if images.shape[2:] != (side, side):
        images = F.interpolate(images, size=(side, side), mode="bicubic", align_corners=False, antialias=False)
    tokens: Tensor = rae.encoder((images - rae.encoder_mean) / rae.encoder_std).last_hidden_state  # [B, 5 + N, C]
    patches = tokens[:, _BEFORE_PATCHES:].transpose(1, 2).float()  # [B, C, N]
    rows = int(patches.shape[-1] ** 0.5)
    latents = patches.reshape(*patches.shape[:2], rows, rows)
    return latents, {TEACHER_TOKEN: tokens[:, 0].float()}


def _decode(rae: Any, latents: Tensor) -> Tensor:
    tokens = latents.flatten(2).transpose(1, 2)  # [B, C, h, w] -> [B, N, C]
    standard = rae.decoder.unpatchify(rae.decoder(tokens).logits)
    images: Tensor = standard * rae.encoder_std + rae.encoder_mean
    return images


AUTOENCODER_RAE = AutoencoderFamily(
    classes=("AutoencoderRAE",),
    space=_space,
    load=_load,
    pixel_range=(0.0, 1.0),
    encode=_encode,
    encode_columns=_encode_columns,
    decode=_decode,
)
