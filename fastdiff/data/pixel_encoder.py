"""The identity in the place of an autoencoder: data sets in pixel space."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.data.shards import Normalisation


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
