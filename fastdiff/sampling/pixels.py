"""Pixels of sampled latents: decoded by an autoencoder, or taken as they are for pixel-space models."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.data.shards.format import DatasetInfo, Normalisation
from fastdiff.errors import ConfigError, DataError, StorageError
from fastdiff.models.encoders.autoencoder import Autoencoder
from fastdiff.models.load import pretrained
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.sampling.latent_statistics import open_autoencoder
from fastdiff.sampling.text import as_bytes

IDENTITY = "identity"
"""Name of the no-op autoencoder of pixel-space models."""
_OF_PIXELS = (1, 3)
"""Channels of gray and RGB images."""


class PixelDecoder:
    """Decoder of latents to pixels.

    Args:
        config: of the run.
        autoencoder: folder or Hugging Face id of a pipeline or of an autoencoder alone, or ``identity``; None: the
            autoencoder of the training data.
        device: of the autoencoder.
        encoded_by: digest of the autoencoder that encoded the training data; None: unknown.
        statistics: of the training latents; None: the autoencoder's own.

    Raises:
        ConfigError: the run was trained on latents, and their autoencoder is unknown or cannot be read.
    """

    def __init__(
        self,
        config: RunConfig,
        autoencoder: str | None,
        device: torch.device,
        encoded_by: str | None = None,
        statistics: Normalisation | None = None,
    ) -> None:
        name = autoencoder or autoencoder_of(config)
        model = config.model
        if name is None:
            raise ConfigError(
                f"{config.output.folder} was trained on latents, and their autoencoder is not known; "
                "name it with --autoencoder FOLDER_OR_ID, or use --autoencoder identity if they are pixels"
            )
        if name == IDENTITY and model.channels not in _OF_PIXELS:
            raise ConfigError(
                f"--autoencoder {IDENTITY}: {config.output.folder} was trained on {model.channels} channels, and "
                "pixels have 1 or 3; name the autoencoder that decodes them"
            )
        self.name = name
        self.digest: str | None = None
        """Digest of the autoencoder's weights; None for ``identity``."""
        self._autoencoder: Autoencoder | None = None
        channels, factor = model.channels, 1
        if name != IDENTITY:
            pipeline = pipeline_of(config.pretrained, name)
            self.digest = pipeline.digest("vae")
            warn_of_another(name, self.digest, encoded_by)
            space = pipeline.latent_space
            channels, factor = space.pixel_channels, space.factor
            if space.channels != model.channels:
                raise ConfigError(
                    f"--autoencoder {name} decodes {space.channels} channels, the model draws {model.channels}; name "
                    "the one that it was trained on"
                )
            self._autoencoder = open_autoencoder(pipeline, device, statistics)
        self.shape = model.size * factor, model.size * factor, channels
        """``(H, W, C)`` of an image."""

    def decoded(self, latents: Tensor) -> Tensor:
        """Decode ``[N, c, h, w]`` to ``[N, C, H, W]`` fp32 in about [-1, 1] on the CPU."""
        return latents if self._autoencoder is None else self._autoencoder.decode(latents)

    def __call__(self, latents: Tensor) -> npt.NDArray[np.uint8]:
        """Decode ``[N, c, h, w]`` finite fp32 to ``[N, H, W, C]`` uint8: [-1, 1] to [0, 255], clamped and rounded."""
        pixels = self.decoded(latents)
        return np.ascontiguousarray(as_bytes(pixels).permute(0, 2, 3, 1).numpy())


def pipeline_of(run: PretrainedConfig, autoencoder: str) -> Pretrained:
    """Return the pipeline, or the folder, of an autoencoder by its name."""
    return pretrained(run) if autoencoder == run.path else Pretrained(autoencoder, flag="--autoencoder")


def warn_of_another(name: str, digest: str, encoded_by: str | None) -> None:
    """Warn of an autoencoder that is not the one that encoded the training data, where its digest is known."""
    if encoded_by not in (None, digest):
        log.warning(
            f"the autoencoder {name} (digest {digest[:12]}) is not the one that encoded the training data "
            f"({str(encoded_by)[:12]}): the images may have other colours and details"
        )


def shown(
    config: RunConfig,
    latents: Tensor,
    device: torch.device,
    encoded_by: str | None,
    statistics: Normalisation | None = None,
) -> Tensor:
    """Return the images ``[N, C, H, W]`` of latents for a picture, in [-1, 1] on the CPU.

    Latents stay as they are if their autoencoder is unknown or cannot be read, which is said.
    """
    if autoencoder_of(config) in (None, IDENTITY):
        return latents
    try:
        return PixelDecoder(config, None, device, encoded_by, statistics).decoded(latents)
    except ConfigError as error:
        log.warning(f"the picture shows the latents themselves, because their autoencoder is not here: {error}")
        return latents


def autoencoder_of(config: RunConfig) -> str | None:
    """Return a run's autoencoder: of its pipeline, else its own, or the data's; ``identity``: pixels, None: unknown."""
    if config.pretrained.path and not config.pretrained.is_file:
        return config.pretrained.path
    made_by = config.data.autoencoder or (IDENTITY if config.model.in_pixels else None)
    if config.data.path and not config.data.autoencoder:  # a published file has no data, an older run no record
        with suppress(DataError, StorageError):  # the data are not on this machine
            made_by = DatasetInfo.read(Path(config.data.path)).provenance.autoencoder
    if made_by == IDENTITY:
        return IDENTITY if may_be_pixels(made_by, config.model.channels) else None
    return made_by or None


def may_be_pixels(made_by: str | None, channels: int) -> bool:
    """Whether data of this autoencoder are pixels; ``identity`` is also recorded for data that were never images."""
    return made_by == IDENTITY and channels in _OF_PIXELS
