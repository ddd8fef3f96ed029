"""Noise levels as rows of coefficients: the one form in which every process reaches the kernels.

A row is ``(alpha, sigma, a, b)``: the model sees ``alpha * x0 + sigma * noise``, and the target is ``a * x0 + b *
noise``. What an error of the prediction means for x0 or for the noise follows from the row alone: with the input known
exactly, ``x0 error = sigma / (a * sigma - b * alpha) * error`` and ``noise error = -alpha / (a * sigma - b * alpha) *
error``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff_kernels.weights import loss_weights


@dataclass(frozen=True, slots=True)
class Levels:
    """The noise levels of a batch."""

    time: Tensor
    """``[B]``, what the model is told: int64 timesteps, or fp32 times of flow and edm."""
    row: Tensor
    """``[B]`` int64: row of each sample in the tables."""
    table: Tensor
    """``[R, 4]`` fp32 rows (alpha, sigma, a, b)."""
    weights: Tensor
    """``[R]`` fp32 weight of the squared error of the prediction."""
    log_snr: Tensor
    """``[R]`` fp32 natural logarithm of alpha^2 / sigma^2 of the row, whatever the variance of the data: the same for
    the same noise in every process; -inf for pure noise, inf without any."""
    depth: Tensor
    """``[R]`` fp32 in [0, 1]: how far towards pure noise, as the process counts (t / T; t; quantile of the sigmas)."""


class Process(Protocol):
    """One way from data to noise. A level has one native number: timestep (int64), t, or sigma."""

    def draw(self, share: Tensor) -> Tensor:
        """``[B]`` shares in [0, 1) of the process's plain density ``-> [B]`` native levels, ascending in noise."""

    def levels(self, native: Tensor) -> Levels:
        """The rows of ``[B]`` native levels, on their device."""


def clean_per_error(table: Tensor) -> Tensor:
    """``[R, 4]`` rows ``-> [R]``: error of x0 over that of the prediction, signed; infinite where x0 cannot be told."""
    alpha, sigma, a, b = table.unbind(1)
    return sigma / (a * sigma - b * alpha)


def noise_per_error(table: Tensor) -> Tensor:
    """``[R, 4]`` rows ``-> [R]``: squared error of the noise over that of the prediction, its limit at pure noise."""
    alpha, sigma, a, b = table.unbind(1)
    # Where the prediction is the noise alone, alpha cancels: it may be 0 (zero-terminal SNR).
    return torch.where(a == 0, 1.0 / b**2, (alpha / (a * sigma - b * alpha)) ** 2)


def snr_weights(kind: str, table: Tensor, snr: Tensor, gamma: float | None) -> Tensor:
    """Weight of the squared error of the prediction for a weighting that is a function of the SNR.

    Args:
        kind: as in ``fastdiff_kernels.weights.loss_weights``.
        table: ``[R, 4]`` rows.
        snr: ``[R]`` signal-to-noise ratios.
        gamma: parameter of the weighting; None: its usual one.

    Returns:
        ``[R]`` of the dtype of ``table``, finite.
    """
    return loss_weights(kind, snr, noise_per_error(table), gamma)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Corruption:
    """The noisy input of the model, ``alpha * x0 + sigma * noise``. The noise is not kept: the loss draws it again."""

    noisy: Tensor
    """``[B, C, H, W]`` x_t, fp32 unless the objective was built with another dtype."""
    levels: Levels
    """The noise levels that were drawn."""
    condition: Condition
    """After the drop for classifier-free guidance (dropped: the null condition)."""
    correction: Tensor | None = None
    """``[B, C, H, W]`` fp32, added to the target (multi-resolution noise, DREAM); None: nothing."""
    importance: Tensor | None = None
    """``[B]`` fp32 weight of each sample's loss, for levels that are drawn unevenly; None: 1."""

    @property
    def time(self) -> Tensor:
        """``[B]``, what the model is told."""
        return self.levels.time
