"""The autoencoder of a pipeline, loaded: images to latents and back, whatever its class."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Self

import torch
from torch import Tensor, nn

from fastdiff.errors import ConfigError, require
from fastdiff.models.encoders.family import AutoencoderFamily, LatentSpace
from fastdiff.models.encoders.registry import faults_in


class Autoencoder:
    """A frozen autoencoder on a device.

    Attributes:
        module: Its module.
        space: Its latents.
    """

    def __init__(self, family: AutoencoderFamily, space: LatentSpace, module: nn.Module) -> None:
        self.space, self.module = space, module
        self._family = family
        self._what = f"the autoencoder {family.classes[0]}"

    def to(self, device: torch.device | str) -> Self:
        """Move it."""
        self.module.to(device)
        return self

    def with_statistics(self, shift: Sequence[float], scale: Sequence[float]) -> Self:
        """Let ``decode`` undo ``(z - shift) * scale`` of other statistics than its own; ConfigError: a wrong number."""
        self.space = replace(self.space, shift=tuple(shift), scale=tuple(scale))
        return self

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Encode ``[B, 3, H, W]`` fp32 in [-1, 1]; H and W are multiples of the factor.

        Returns:
            ``[B, C, h, w]`` float32, not normalised, or ``[B, 2C, h, w]`` mean and standard deviation of a posterior.
            Values are not finite where the autoencoder overflowed.

        Raises:
            ConfigError: the latents have another shape than its record says, or its code raises an exception.
        """
        return self._latents_of(images, self._family.encode)

    @torch.no_grad()
    def encode_columns(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Encode as ``encode``, and return what its record has beside the latents, ``[B, ...]`` float32 by name."""
        columns: dict[str, Tensor] = {}
        if (encode := self._family.encode_columns) is None:
            return self.encode(images), columns

        def noting(module: nn.Module, given: Tensor) -> Tensor:
            latents, found = encode(module, given)
            columns.update(found)
            return latents

        latents = self._latents_of(images, noting)
        shapes = {name: tuple(value.shape[1:]) for name, value in columns.items()}
        require(
            shapes == dict(self.space.columns),
            f"{self._what} returns {shapes} beside its latents, expected {dict(self.space.columns)} by its LatentSpace",
        )
        return latents, columns

    def _latents_of(self, images: Tensor, encode: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        space, (rows, _, height, width) = self.space, images.shape
        black, white = self._family.pixel_range
        if (black, white) != (-1.0, 1.0):
            images = black + (images + 1) * ((white - black) / 2)  # in fp32: half precision would round once more
        with faults_in(self._family, f"{self._what}: encode"):
            latents = encode(self.module, images.to(self._of_weights.dtype)).float()
        channels = space.channels * (2 if space.posterior else 1)
        self._require("latents", latents, images, (rows, channels, height // space.factor, width // space.factor))
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalised latents to pixels, image by image, because the last layers take much memory.

        Args:
            latents: ``[N, C, H, W]`` on any device.

        Returns:
            ``[N, 3, h, w]`` fp32 in [-1, 1] on the CPU.

        Raises:
            ConfigError: as ``encode``, or nothing says how its latents were normalised.
        """
        require(
            self.space.has_statistics,
            f"{self._what} has no statistics of its latents, and none were measured with `fastdiff encode`; use the "
            "one that encoded the data of this run",
        )
        weights, images = self._of_weights, []
        shift, scale = self._of_latents(self.space.shift), self._of_latents(self.space.scale)
        black, white = self._family.pixel_range
        for latent in latents:
            stored = latent[None].to(device=weights.device, dtype=weights.dtype) / scale + shift
            with faults_in(self._family, f"{self._what}: decode"):
                pixels = self._family.decode(self.module, stored).float()
            if (black, white) != (-1.0, 1.0):
                pixels = (pixels - black) * (2 / (white - black)) - 1
            pixels = pixels.clamp(-1, 1).cpu()
            sides = [side * self.space.factor for side in latent.shape[1:]]
            self._require("images", pixels, stored, (1, self.space.pixel_channels, *sides))
            images.append(pixels)
        return torch.cat(images)

    def _require(self, what: str, found: Tensor, given: Tensor, expected: tuple[int, ...]) -> None:
        if tuple(found.shape) != expected:
            space = self._family.space
            raise ConfigError(
                f"{self._what} returns {what} {list(found.shape)} for {list(given.shape)}, expected {list(expected)} "
                f"by its LatentSpace, channels={self.space.channels}, factor={self.space.factor}, "
                f"posterior={self.space.posterior} and pixel_channels={self.space.pixel_channels}; correct these in "
                f"space of its AutoencoderFamily ({space.__module__}.{getattr(space, '__qualname__', space)})"
            )

    @property
    def _of_weights(self) -> Tensor:
        """A tensor with the device and the dtype of its weights."""
        return next(chain(self.module.parameters(), self.module.buffers()))

    def _of_latents(self, values: tuple[float, ...]) -> Tensor | float:
        """Return ``[C, 1, 1]`` or ``[C, h, w]``, or the number where all are the same, as in diffusers."""
        if len(set(values)) == 1:
            return values[0]
        side = (self.space.side or 1) if len(values) > self.space.channels else 1
        weights = self._of_weights
        return torch.tensor(values, dtype=weights.dtype, device=weights.device).view(self.space.channels, side, side)
