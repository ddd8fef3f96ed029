"""Frozen encoders of images and captions, for encoded and online training: a pipeline's models, or raw pixels."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fastdiff.data.shards.format import Normalisation
from fastdiff.models.encoders.autoencoder import Autoencoder
from fastdiff.models.encoders.text_encoders import TextEncoders
from fastdiff.models.pretrained.pipeline import Pretrained

_TENSORS = 6
"""Tensors as large as the autoencoder's largest activation that lie in memory together, workspace and a copy in another
format counted."""


class LatentEncoder:
    """An encoder of pixels to latents and of captions to embeddings; its models are loaded at first use.

    Args:
        pretrained: The pipeline.
        device: Device of the models.
        dtype: Dtype of weights and activations. Latents are always float32.

    Raises:
        ConfigError: From every member: a part of the pipeline is missing, or of a class without a record.
    """

    def __init__(self, pretrained: Pretrained, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self._pretrained, self._dtype = pretrained, dtype
        self._space = pretrained.latent_space
        self.channels = self._space.channels
        self.factor = self._space.factor

    @property
    def kind(self) -> Literal["mean", "posterior"]:
        """What ``encode`` returns, see ``DatasetInfo.kind``."""
        return "posterior" if self._space.posterior else "mean"

    @property
    def normalisation(self) -> Normalisation:
        """The normalisation of what ``encode`` returns to x0; a posterior has 2C shifts and scales."""
        shift, scale = self._space.shift, self._space.scale
        if self._space.posterior:
            shift, scale = (*shift, *[0.0] * self.channels), (*scale, *scale)
        return Normalisation(shift=shift, scale=scale)

    def load(self, *, text: bool) -> None:
        """Load the autoencoder and, with ``text``, the text encoders now."""
        _ = self._autoencoder, text and self._text

    def held_bytes(self, images: int, side: int) -> int:
        """Return the bytes on the device of the models, and an estimate for encoding this many images at once.

        The estimate is that of the autoencoder's largest activation.

        Args:
            images: at once.
            side: of an image, in pixels.
        """
        parameters = (*self._autoencoder.module.parameters(), *self._text.parameters())
        weights = sum(p.numel() * p.element_size() for p in parameters)
        numbers = images * self._space.values_per_pixel * side**2
        return int(weights) + _TENSORS * numbers * self._dtype.itemsize

    def encode(self, pixels: Tensor) -> Tensor:
        """Return the latents of ``pixels / 127.5 - 1``, ``[B, H, W, 3]`` uint8; see ``Autoencoder.encode``."""
        # [B, H, W, 3] -> [B, 3, H, W] as a view in channels_last, the memory format of the autoencoder's weights.
        # In fp32, because in half precision both the division and the subtraction would round.
        images = pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float() / 127.5 - 1
        return self._autoencoder.encode(images)

    def embed(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the conditions of N captions, ``[N, ...]`` each, in ``dtype``."""
        return self._text(captions)

    def batches(self, captions: Sequence[str], size: int) -> list[list[int]]:
        """Return the numbers of the captions of each pass; see ``TextEncoders.batches``."""
        return self._text.batches(captions, size)

    def lost(self, captions: Sequence[str]) -> Mapping[int, int]:
        """Return the tokens of these captions that are not read, by the number that is; see ``TextEncoders.lost``."""
        return self._text.lost(captions)

    def null(self) -> dict[str, Tensor]:
        """Return the conditions of "no caption", in ``dtype``."""
        return self._text.null()

    @cached_property
    def _autoencoder(self) -> Autoencoder:
        found = self._pretrained.autoencoder(self.device, self._dtype)
        for weight in found.module.parameters():
            if weight.dim() == 4:  # others have no such format
                weight.data = weight.data.to(memory_format=torch.channels_last)
        return found

    @cached_property
    def _text(self) -> TextEncoders:
        return self._pretrained.text(self.device, self._dtype)


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
        kind: Of the levels: they are no posterior.
        normalisation: Normalisation of the levels to x0, applied by ``fastdiff_kernels.noising.dequantised``.
    """

    device = torch.device("cpu")
    factor = 1
    kind: Literal["mean", "posterior"] = "mean"
    normalisation = Normalisation.of_pixels(3)

    def load(self, *, text: bool) -> None:
        """Do nothing: there is no model."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Return pixels ``[B, H, W, 3]`` uint8 as ``[B, 3, H, W]`` uint8."""
        return pixels.permute(0, 3, 1, 2).contiguous()

    def embed(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return no embeddings."""
        return {}

    def batches(self, captions: Sequence[str], size: int) -> list[list[int]]:
        """Return no pass: no caption is read."""
        return []

    def lost(self, captions: Sequence[str]) -> Mapping[int, int]:
        """Return nothing: no caption is read."""
        return {}

    def null(self) -> dict[str, Tensor]:
        """Return no embedding of the empty caption."""
        return {}
