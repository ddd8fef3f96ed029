"""The frozen autoencoder and text encoders of a pipeline, as an encode and online training use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastdiff.data.shards.format import Normalisation
from fastdiff.errors import ConfigError
from fastdiff.models.pretrained.pipeline import Pretrained, TextEncoder

# Of AutoencoderKL, for configurations that are older than the field.
_SCALING_FACTOR = 0.18215


class LatentEncoder:
    """Pixels to posteriors and captions to embeddings; the models are loaded when they are first used.

    Args:
        pretrained: The pipeline.
        device: Where to compute.
        dtype: Of weights and activations. The posterior's mean and standard deviation are float32 in any case.

    Raises:
        ConfigError: From every member: a part of the pipeline is missing, or its autoencoder is no AutoencoderKL.
    """

    def __init__(self, pretrained: Pretrained, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self._pretrained, self._dtype = pretrained, dtype
        self._config = pretrained.json("vae/config.json")
        kind = self._config.get("_class_name", "AutoencoderKL")
        if kind != "AutoencoderKL":
            raise ConfigError(f"{pretrained.path} has an autoencoder of the kind {kind}; expected AutoencoderKL")

    @cached_property
    def channels(self) -> int:
        """Channels C of a latent."""
        return int(self._config["latent_channels"])

    @cached_property
    def factor(self) -> int:
        """How many pixels wide and high one position of a latent is."""
        return int(2 ** (len(self._config["block_out_channels"]) - 1))

    @cached_property
    def normalisation(self) -> Normalisation:
        """What makes x0 of a posterior's mean and standard deviation: 2C shifts and scales.

        ``(mean - shift) * scale`` with the autoencoder's ``scaling_factor`` and ``shift_factor``; where it has
        ``latents_mean`` and ``latents_std`` per channel, the mean is the shift and the scale is divided by the latter.
        """
        scaling = float(self._config.get("scaling_factor", _SCALING_FACTOR))
        shift = [float(self._config.get("shift_factor") or 0.0)] * self.channels
        scale = [scaling] * self.channels
        means, deviations = self._config.get("latents_mean"), self._config.get("latents_std")
        if means is not None and deviations is not None:
            shift, scale = [float(mean) for mean in means], [scaling / float(std) for std in deviations]
        return Normalisation(shift=(*shift, *[0.0] * self.channels), scale=(*scale, *scale))

    def load(self, *, text: bool) -> None:
        """Load the autoencoder and, if asked for, the text encoders now."""
        _ = self._vae, text and self._text

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """The autoencoder's posterior of images ``x / 127.5 - 1``.

        Args:
            pixels: ``[B, H, W, 3]`` uint8, on any device; H and W are multiples of ``factor``.

        Returns:
            ``[B, 2C, H / factor, W / factor]`` float32, not normalised: mean, then standard deviation. Not finite
            where the autoencoder overflowed.
        """
        # The permuted view of [B, H, W, 3] is what torch calls channels_last, in which the autoencoder's weights are.
        # In fp32 up to the end: in half precision the division and the difference would each round.
        images = pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float() / 127.5 - 1
        distribution = self._vae.encode(images.to(self._dtype)).latent_dist
        deviation = (0.5 * distribution.logvar.float()).exp()
        return torch.cat([distribution.mean.float(), deviation], dim=1)

    def embed(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """``context [N, L, D]`` and, with two text encoders, ``pooled [N, P]``, in ``dtype``.

        All L positions of a caption are kept, those behind its last token too: the UNet attends to them, and their
        values depend on the caption, so that a trimmed embedding would train something else.
        """
        return self._text(captions)

    def null(self) -> dict[str, Tensor]:
        """The embedding of no caption, ``context [L, D]`` and ``pooled [P]``, in ``dtype``."""
        return self._text.null()

    @cached_property
    def _vae(self) -> Any:
        return self._pretrained.vae(self.device, self._dtype).to(memory_format=torch.channels_last)

    @cached_property
    def _text(self) -> TextEncoder:
        return self._pretrained.text(self.device, self._dtype)


def time_ids(original_size: tuple[int, int], crop: tuple[int, int], size: tuple[int, int]) -> tuple[float, ...]:
    """SDXL's micro-conditioning (Podell et al. 2023, arXiv:2307.01952, section 2.2).

    A mirrored image has the crop of the image itself: of a centred crop, both are the same but for a pixel.

    Args:
        original_size: Height and width of the image in the file.
        crop: Top and left of the crop in the resized image.
        size: Height and width of the crop, which is the target size.

    Returns:
        Original height and width, crop top and left, target height and width, all in pixels.
    """
    return tuple(map(float, (*original_size, *crop, *size)))


@contextmanager
def reproducible() -> Iterator[None]:
    """Deterministic convolutions, which are not tried out first, and no TensorFloat32.

    On a CPU one thread per operator: sums that are split over threads depend on how many there are.
    """
    matmul, threads = torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads()
    torch.backends.cuda.matmul.allow_tf32 = False
    if threads > 1:  # else nothing: torch would take it as the wish of threads that are yet to start
        torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = matmul


class PixelEncoder:
    """Stands where a ``LatentEncoder`` does, and stores the levels of the pixels as they are, without captions.

    Attributes:
        device: The CPU: there is nothing to compute.
        factor: How many pixels wide and high one position of a latent is.
        normalisation: What makes x0 of the levels, by ``fastdiff_kernels.noising.dequantised``.
    """

    device = torch.device("cpu")
    factor = 1
    normalisation = Normalisation.of_pixels(3)

    def load(self, *, text: bool) -> None:
        """Nothing is loaded."""

    def encode(self, pixels: Tensor) -> Tensor:
        """``[B, H, W, 3]`` uint8 to ``[B, 3, H, W]`` uint8."""
        return pixels.permute(0, 3, 1, 2).contiguous()

    def embed(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Nothing is embedded."""
        return {}

    def null(self) -> dict[str, Tensor]:
        """There is no embedding of no caption either."""
        return {}
