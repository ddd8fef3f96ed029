"""Frozen encoders of images and captions, for encoded and online training: a pipeline's models, or raw pixels."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from fastdiff.data.encoding.posterior import Posterior, stored
from fastdiff.data.encoding.statistics import OWN, Statistics, choose
from fastdiff.data.shards.format import Normalisation
from fastdiff.errors import require
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
        statistics: Of the latents; None: the autoencoder's own.
        posterior: What is stored of a posterior.

    Raises:
        ConfigError: From every member: a part of the pipeline is missing, or of a class without a record.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        device: torch.device,
        dtype: torch.dtype,
        *,
        statistics: Statistics | None = None,
        posterior: Posterior = "each-step",
    ) -> None:
        self.device = device
        self._pretrained, self._dtype = pretrained, dtype
        self._space = pretrained.latent_space
        self.statistics = statistics or choose(OWN, self._space)
        self._posterior = posterior
        require(
            posterior == "each-step" or self._space.posterior,
            f"--posterior {posterior}: the autoencoder of {pretrained.path} has no posterior; leave it out",
        )
        self.factor = self._space.factor

    @property
    def kind(self) -> Literal["mean", "posterior"]:
        """What ``encode`` returns, see ``DatasetInfo.kind``."""
        return "posterior" if self._space.posterior and self._posterior == "each-step" else "mean"

    @property
    def channels(self) -> int:
        """Channels of what ``encode`` returns."""
        return self._space.channels * (2 if self.kind == "posterior" else 1)

    @property
    def side(self) -> int | None:
        """Height and width of a latent, if the autoencoder takes images of one size."""
        return self._space.side

    @property
    def normalisation(self) -> Normalisation:
        """The normalisation of what ``encode`` returns to x0, without effect until its statistics are measured."""
        count = self._space.channels
        found = self.statistics.known or Normalisation(shift=(0.0,) * count, scale=(1.0,) * count)
        return found.of_posterior if self.kind == "posterior" else found

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

    def stored(self, latents: Tensor, keys: Sequence[str], *, mirrored: bool) -> Tensor:
        """Return what a data set keeps of latents that ``encode`` returned; see ``posterior.stored``."""
        if not self._space.posterior:
            return latents
        return stored(latents, self._posterior, keys, mirrored=mirrored)

    def means(self, latents: Tensor) -> Tensor:
        """Return the latents ``[B, C, h, w]`` that ``encode`` returned; of posteriors, their means."""
        return stored(latents, "mean", (), mirrored=False) if self._space.posterior else latents

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what ``encode_columns`` gives beside the latents, by name."""
        return self._space.columns

    def encode(self, pixels: Tensor) -> Tensor:
        """Return the latents of ``pixels / 127.5 - 1``, ``[B, H, W, 3]`` uint8; see ``Autoencoder.encode``."""
        return self._autoencoder.encode(self._images(pixels))

    def encode_columns(self, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the latents as ``encode``, and the further columns of the same pass."""
        return self._autoencoder.encode_columns(self._images(pixels))

    def _images(self, pixels: Tensor) -> Tensor:
        # [B, H, W, 3] -> [B, 3, H, W] as a view in channels_last, the memory format of the autoencoder's weights.
        # In fp32, because in half precision both the division and the subtraction would round.
        return pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float() / 127.5 - 1

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


def require_side(encoder: "LatentEncoder | PixelEncoder", resolution: int, flag: str) -> None:
    """Raise ConfigError unless the autoencoder takes images of this resolution, if it takes only one."""
    pixels = (encoder.side or 0) * encoder.factor
    require(
        not pixels or resolution == pixels,
        f"{flag} {resolution}: the autoencoder takes images of {pixels} pixels alone; use {flag} {pixels}",
    )


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
        channels: Of an image.
        side: None: images may have any size.
        columns: None beside the pixels.
        normalisation: Normalisation of the levels to x0, applied by ``fastdiff_kernels.noising.dequantised``.
    """

    device = torch.device("cpu")
    factor = 1
    channels = 3
    side: int | None = None
    columns: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    kind: Literal["mean", "posterior"] = "mean"
    normalisation = Normalisation.of_pixels(3)

    def load(self, *, text: bool) -> None:
        """Do nothing: there is no model."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Return pixels ``[B, H, W, 3]`` uint8 as ``[B, 3, H, W]`` uint8."""
        return pixels.permute(0, 3, 1, 2).contiguous()

    def encode_columns(self, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return ``encode``, and nothing beside it."""
        return self.encode(pixels), {}

    def stored(self, latents: Tensor, keys: Sequence[str], *, mirrored: bool) -> Tensor:
        """Return the pixels as they are."""
        return latents

    def means(self, latents: Tensor) -> Tensor:
        """Return the pixels as they are."""
        return latents

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
