"""An autoencoder without a posterior: 2x2 pixels, rotated, with statistics of its own per channel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.models.encoders.family import AutoencoderFamily, LatentSpace
from fastdiff.models.pipeline_files import PipelineFiles

FACTOR, CHANNELS = 2, 12


class ToyAutoencoder(nn.Module):
    """An orthogonal map, and so without loss."""

    rotation: Tensor
    """``[12, 12]``."""

    def __init__(self, rotation: Tensor) -> None:
        super().__init__()
        self.register_buffer("rotation", rotation)

    def encode(self, images: Tensor) -> Tensor:
        """``[B, 3, H, W] -> [B, 12, H / 2, W / 2]``."""
        return torch.einsum("dc,bchw->bdhw", self.rotation, F.pixel_unshuffle(images, FACTOR))

    def decode(self, latents: Tensor) -> Tensor:
        """``[B, 12, h, w] -> [B, 3, 2 h, 2 w]``."""
        return F.pixel_shuffle(torch.einsum("dc,bdhw->bchw", self.rotation, latents), FACTOR)


def _space(pipeline: PipelineFiles) -> LatentSpace:
    weights = pipeline.weights("vae")
    return LatentSpace(
        channels=CHANNELS,
        factor=FACTOR,
        shift=tuple(weights["mean"].tolist()),
        scale=tuple((1 / weights["std"]).tolist()),
        values_per_pixel=3,
    )


def _load(pipeline: PipelineFiles, device: torch.device | str, dtype: torch.dtype) -> ToyAutoencoder:
    return ToyAutoencoder(pipeline.weights("vae")["rotation"]).to(device, dtype)


def _encode(module: ToyAutoencoder, images: Tensor) -> Tensor:
    return module.encode(images).float()


TOY_AUTOENCODER = AutoencoderFamily(
    classes=("ToyAutoencoder",), space=_space, load=_load, encode=_encode, decode=ToyAutoencoder.decode
)
