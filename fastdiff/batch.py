"""The types between data, objective and model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on one rank, on the training device."""

    latents: Tensor
    """``[B, C, H, W]`` clean latents x0, normalised, fp16, bf16 or fp32."""
    position: Tensor
    """``[B]`` int64, position of each sample in the run; it keys every random number (design 4.4)."""
    label: Tensor | None = None
    """``[B]`` int64 class of each sample; None for unconditional data."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """The noisy input of the model, ``alpha * x0 + sigma * noise``. The noise is not kept: the loss draws it again."""

    noisy: Tensor
    """``[B, C, H, W]`` x_t, fp32 unless the objective was built with another dtype."""
    time: Tensor
    """``[B]`` int64 timestep t in [0, timesteps)."""
    label: Tensor | None
    """``[B]`` int64 class after the drop for classifier-free guidance (dropped: the null class)."""
