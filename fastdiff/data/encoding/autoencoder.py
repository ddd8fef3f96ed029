"""Frozen encoders of images and captions, for encoded and online training: a pipeline's models, or raw pixels."""

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

# Default of AutoencoderKL, for older configurations without the field.
_SCALING_FACTOR = 0.18215
_TENSORS = 6
"""Tensors of the autoencoder's first block that lie in memory together, workspace and a copy in another format counted.
"""


class LatentEncoder:
    """An encoder of pixels to posteriors and of captions to embeddings; its models are loaded at first use.

    Args:
        pretrained: The pipeline.
        device: Device of the models.
        dtype: Dtype of weights and activations. The posterior's mean and standard deviation are always float32.

    Raises:
        ConfigError: From every member: a part of the pipeline is missing, or the autoencoder is not an AutoencoderKL.
    """

    def __init__(self, pretrained: Pretrained, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self._pretrained, self._dtype = pretrained, dtype
        self._config = pretrained.json("vae/config.json")
        kind = self._config.get("_class_name", "AutoencoderKL")
        if kind != "AutoencoderKL":
            raise ConfigError(f"{pretrained.path} has an autoencoder of class {kind}; expected AutoencoderKL")

    @cached_property
    def channels(self) -> int:
        """Channels C of a latent."""
        return int(self._config["latent_channels"])

    @cached_property
    def factor(self) -> int:
        """Pixels per latent position, in height and in width."""
        return int(2 ** (len(self._config["block_out_channels"]) - 1))

    @cached_property
    def normalisation(self) -> Normalisation:
        """The normalisation of the posterior's mean and standard deviation to x0: 2C shifts and scales.

        x0 is ``(mean - shift) * scale`` with the autoencoder's ``scaling_factor`` and ``shift_factor``. If it has
        ``latents_mean`` and ``latents_std`` per channel, the shift is ``latents_mean`` and the scale is
        ``scaling_factor / latents_std``.
        """
        scaling = float(self._config.get("scaling_factor", _SCALING_FACTOR))
        shift = [float(self._config.get("shift_factor") or 0.0)] * self.channels
        scale = [scaling] * self.channels
        means, deviations = self._config.get("latents_mean"), self._config.get("latents_std")
        if means is not None and deviations is not None:
            shift, scale = [float(mean) for mean in means], [scaling / float(std) for std in deviations]
        return Normalisation(shift=(*shift, *[0.0] * self.channels), scale=(*scale, *scale))

    def load(self, *, text: bool) -> None:
        """Load the autoencoder and, with ``text``, the text encoders now."""
        _ = self._vae, text and self._text

    def held_bytes(self, images: int, side: int) -> int:
        """Return the bytes on the device of the models, and an estimate for encoding this many images at once.

        The estimate is that of the first block, which works at the full resolution.

        Args:
            images: at once.
            side: of an image, in pixels.
        """
        weights = sum(p.numel() * p.element_size() for p in (*self._vae.parameters(), *self._text.parameters()))
        numbers = images * int(self._config["block_out_channels"][0]) * side**2
        return int(weights) + _TENSORS * numbers * self._dtype.itemsize

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Return the autoencoder's posterior of the images ``pixels / 127.5 - 1``.

        Args:
            pixels: ``[B, H, W, 3]`` uint8, on any device; H and W are multiples of ``factor``.

        Returns:
            ``[B, 2C, H / factor, W / factor]`` float32, not normalised: mean, then standard deviation. Values are not
            finite where the autoencoder overflowed.
        """
        # [B, H, W, 3] -> [B, 3, H, W] as a view in channels_last, the memory format of the autoencoder's weights.
        # In fp32, because in half precision both the division and the subtraction would round.
        images = pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float() / 127.5 - 1
        distribution = self._vae.encode(images.to(self._dtype)).latent_dist
        deviation = (0.5 * distribution.logvar.float()).exp()
        return torch.cat([distribution.mean.float(), deviation], dim=1)  # 2 x [B, C, h, w] -> [B, 2C, h, w]

    def embed(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return ``context [N, L, D]`` and, with two text encoders, ``pooled [N, P]``, in ``dtype``.

        All L positions are kept, padding after the last token included: the UNet attends to the padding and its values
        depend on the caption, so a trimmed embedding would change the training.
        """
        return self._text(captions)

    def cut(self, captions: Sequence[str]) -> int | None:
        """Return the tokens that are read of a caption, if one of these has more; otherwise None."""
        return self._text.cut(captions)

    def null(self) -> dict[str, Tensor]:
        """Return the embedding of the empty caption, ``context [L, D]`` and ``pooled [P]``, in ``dtype``."""
        return self._text.null()

    @cached_property
    def _vae(self) -> Any:
        return self._pretrained.vae(self.device, self._dtype).to(memory_format=torch.channels_last)

    @cached_property
    def _text(self) -> TextEncoder:
        return self._pretrained.text(self.device, self._dtype)


def time_ids(original_size: tuple[int, int], crop: tuple[int, int], size: tuple[int, int]) -> tuple[float, ...]:
    """Return SDXL's micro-conditioning (Podell et al. 2023, arXiv:2307.01952, section 2.2).

    A mirrored image keeps the crop of the original image; for a centred crop both differ by at most a pixel.

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
    """Use deterministic convolutions without benchmarking, and no TensorFloat32.

    On a CPU each operator gets one thread: sums split over threads depend on their number.
    """
    matmul, threads = torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads()
    torch.backends.cuda.matmul.allow_tf32 = False
    if threads > 1:  # otherwise unchanged: torch would apply the setting to threads started later
        torch.set_num_threads(1)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = matmul


class PixelEncoder:
    """An encoder with the interface of ``LatentEncoder`` that keeps pixel levels unchanged and embeds no captions.

    Attributes:
        device: The CPU, as nothing is computed.
        factor: Pixels per latent position: 1.
        normalisation: Normalisation of the levels to x0, applied by ``fastdiff_kernels.noising.dequantised``.
    """

    device = torch.device("cpu")
    factor = 1
    normalisation = Normalisation.of_pixels(3)

    def load(self, *, text: bool) -> None:
        """Do nothing: there is no model."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Return pixels ``[B, H, W, 3]`` uint8 as ``[B, 3, H, W]`` uint8."""
        return pixels.permute(0, 3, 1, 2).contiguous()

    def embed(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return no embeddings."""
        return {}

    def cut(self, captions: Sequence[str]) -> int | None:
        """Return None: no caption is read."""
        return None

    def null(self) -> dict[str, Tensor]:
        """Return no embedding of the empty caption."""
        return {}
