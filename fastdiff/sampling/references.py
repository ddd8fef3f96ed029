"""Reference pictures of images to draw: files to normalised latents."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fastdiff.data.encoding.autoencoder import LatentEncoder
from fastdiff.data.images.decode import BadImage, ImageTransform, PillowDecoder
from fastdiff.data.shards.format import Normalisation
from fastdiff.errors import ConfigError, DataError
from fastdiff.models.pretrained.pipeline import Pretrained


def encode_references(
    pipeline: Pretrained, files: Sequence[Path], size: int, statistics: Normalisation | None, flag: str = "--reference"
) -> Tensor:
    """Encode pictures as `fastdiff encode` encodes references, in fp32 on the CPU; the autoencoder is freed.

    Args:
        pipeline: provides the autoencoder.
        files: N pictures.
        size: height and width of their latents; they are resized to cover it, and cropped at the centre.
        statistics: of the training latents; None: those of the autoencoder.
        flag: that gave the files, for messages.

    Returns:
        ``[N, C, size, size]``, normalised.

    Raises:
        ConfigError: a file cannot be read.
        DataError: it is no picture.
    """
    try:
        contents = [file.read_bytes() for file in files]
    except OSError as error:
        raise ConfigError(f"{flag} {error.filename}: {error.strerror}; give the file of a picture") from error
    encoder, space = LatentEncoder(pipeline, torch.device("cpu"), torch.float32), pipeline.latent_space
    decoder = PillowDecoder(ImageTransform(size * encoder.factor, "center", "lanczos"), 1)
    pixels = []
    for file, decoded in zip(files, decoder.decode(contents), strict=True):
        if isinstance(decoded, BadImage):
            raise DataError(f"{flag} {file}: {decoded.reason}; give another picture")
        pixels.append(decoded.pixels)
    latents = encoder.means(encoder.encode(torch.from_numpy(np.stack(pixels))))
    found = statistics or Normalisation(shift=space.shift, scale=space.scale)
    shape = latents.shape[1:] if len(found.shift) > space.channels else (space.channels, 1, 1)
    shift, scale = (torch.tensor(values).view(shape) for values in (found.shift, found.scale))
    return (latents - shift) * scale
