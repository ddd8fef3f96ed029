"""What a data set stores of an autoencoder's posterior: mean and deviation, one sample of it, or its mean.

A sample that is drawn at encoding is a function of the key of the picture, and so of neither ranks nor batches.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fastdiff.rng import Stream
from fastdiff_kernels import philox

Posterior = Literal["each-step", "once", "mean"]


def stored(posterior: Tensor, how: Posterior, keys: Sequence[str], *, mirrored: bool) -> Tensor:
    """Return what is stored of posteriors ``[B, 2C, h, w]`` fp32, mean and then deviation.

    Args:
        posterior: Of B pictures.
        how: ``each-step`` keeps it, so that training draws a sample in every step; ``once`` draws the sample
            ``[B, C, h, w]`` now; ``mean`` is its mean.
        keys: Of the pictures in the data set.
        mirrored: Whether these are the mirrored pictures, whose samples have numbers of their own.
    """
    if how == "each-step":
        return posterior
    mean, deviation = posterior.chunk(2, dim=1)
    if how == "mean":
        return mean
    position = torch.tensor([_position(key) for key in keys], device=mean.device)
    # Always plain torch, whatever backend a process forces; the numbers are equal.
    noise = philox.normal(int(mirrored), int(Stream.POSTERIOR), position, mean[0].numel(), backend="reference")
    return mean + deviation * noise.view_as(mean)


def _position(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
