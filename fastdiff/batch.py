"""The types between data, objective and model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

Condition = dict[str, Tensor]
"""Conditioning inputs of a model besides the time, as its keyword arguments.

``label``: ``[B]`` int64 classes. ``context``: ``[B, L, D]`` embeddings of the tokens of a caption. ``pooled``:
``[B, P]`` embedding of the whole caption, and ``time_ids``: ``[B, 6]`` fp32 original height and width, top and left of
the crop, and height and width of the image in pixels (both SDXL: Podell et al. 2023, arXiv:2307.01952, section 2.2).
``low_res``: ``[B, C, h, w]`` fp32 small images to enlarge. ``position``: ``[B]`` int64 positions in the run, which key
a dropout.
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on one rank, on the training device."""

    latents: Tensor
    """``[B, C, H, W]`` clean latents x0, normalised, or ``[B, 2C, H, W]`` mean and std of the autoencoder's posterior,
    stacked on channels; fp16, bf16 or fp32. In pixel space ``[B, C, H, W]`` uint8, which
    ``fastdiff_kernels.noising.dequantised`` converts to x0."""
    position: Tensor
    """``[B]`` int64, position of each sample in the run; it keys every random number (design 4.4)."""
    condition: Condition

    def first(self, count: int) -> Self:
        """Return the first ``count`` samples."""
        condition = {name: value[:count] for name, value in self.condition.items()}
        return type(self)(self.latents[:count], self.position[:count], condition)
