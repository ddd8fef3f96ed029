"""What a run draws, as pixels: an autoencoder decodes latents, and the models of pixels need none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.config.run import RunConfig
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.errors import ConfigError, DataError, StorageError
from fastdiff.models.load import pretrained
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.sampling.text import as_bytes, decode, scale_factor

IDENTITY = "identity"
"""The autoencoder of models of pixels, which does nothing."""
_OF_PIXELS = (1, 3)
"""Channels of a gray image, and of RGB."""


class PixelDecoder:
    """Turns latents into pixels.

    Args:
        config: the run's.
        autoencoder: folder or Hugging Face id of a pipeline or of an autoencoder alone, or ``identity``; None: what the
            run was trained on.
        device: where the autoencoder computes.

    Raises:
        ConfigError: the run was trained on latents, and their autoencoder is not known or cannot be read.
    """

    def __init__(self, config: RunConfig, autoencoder: str | None, device: torch.device) -> None:
        name = autoencoder or autoencoder_of(config)
        model = config.model
        if name is None:
            raise ConfigError(
                f"{config.output.folder} was trained on latents, and the autoencoder that decodes them is not known; "
                "name it with --autoencoder FOLDER_OR_ID, or say --autoencoder identity if they are pixels"
            )
        if name == IDENTITY and model.channels not in _OF_PIXELS:
            raise ConfigError(
                f"--autoencoder {IDENTITY}: {config.output.folder} was trained on {model.channels} channels, and "
                "pixels have 1 or 3; name the autoencoder that decodes them"
            )
        self.name = name
        self.digest: str | None = None
        """Of the weights of the autoencoder."""
        self._vae: Any = None
        channels, factor = model.channels, 1
        if name != IDENTITY:
            pipeline = pretrained(config) if name == config.pretrained.path else Pretrained(name)
            self.digest = pipeline.digest("vae")
            self._vae = pipeline.vae(device)
            channels, factor = int(self._vae.config.out_channels), scale_factor(pipeline)
            if self._vae.config.latent_channels != model.channels:
                raise ConfigError(
                    f"--autoencoder {name} decodes {self._vae.config.latent_channels} channels, the model draws "
                    f"{model.channels}; name the one that it was trained on"
                )
        self.shape = model.size * factor, model.size * factor, channels
        """``(H, W, C)`` of an image."""

    def __call__(self, latents: Tensor) -> npt.NDArray[np.uint8]:
        """``[N, c, h, w]`` fp32, finite, to ``[N, H, W, C]``: -1 becomes 0 and 1 becomes 255, rounded and clamped."""
        pixels = latents if self._vae is None else decode(self._vae, latents)
        return np.ascontiguousarray(as_bytes(pixels).permute(0, 2, 3, 1).numpy())


def autoencoder_of(config: RunConfig) -> str | None:
    """Name of the autoencoder of a run: that of its pipeline, or else what its data were encoded with.

    Returns:
        ``identity`` for models of pixels; None if nothing here tells.
    """
    if config.pretrained.path and not config.pretrained.is_file:
        return config.pretrained.path
    try:
        made_by = DatasetInfo.read(Path(config.data.path)).provenance.autoencoder
    except (DataError, StorageError):  # the data are not on this machine
        made_by = IDENTITY if config.model.in_pixels else ""
    if made_by == IDENTITY:
        return IDENTITY if may_be_pixels(made_by, config.model.channels) else None
    return made_by or None


def may_be_pixels(made_by: str | None, channels: int) -> bool:
    """Whether data that this autoencoder made are pixels; identity is also said of some that were never images."""
    return made_by == IDENTITY and channels in _OF_PIXELS
