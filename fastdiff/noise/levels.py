"""Noise levels as rows of coefficients: the one form in which every process reaches the kernels.

A row is ``(alpha, sigma, a, b)``: the model sees ``alpha * x0 + sigma * noise``, and the target is ``a * x0 + b *
noise``. What an error of the prediction means for x0 or for the noise follows from the row alone: with the input known
exactly, ``x0 error = sigma / (a * sigma - b * alpha) * error`` and ``noise error = -alpha / (a * sigma - b * alpha) *
error``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

SnrWeighting = Literal["none", "min_snr", "soft_min_snr", "p2", "debiased", "snr"]

GAMMA = {"min_snr": 5.0, "soft_min_snr": 5.0, "p2": 1.0}
"""Parameter of each weighting that has one, where none is given."""


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


def loss_weights(
    kind: SnrWeighting,
    snr: Tensor,
    noise_per_error: Tensor,
    gamma: float | None = None,
) -> Tensor:
    """Weight of the squared error at each timestep.

    A kind means the same for every prediction. It is stated for the squared error of the noise, w(snr):

    * ``min_snr``: min(1, gamma / snr) (Hang et al. 2023, arXiv:2303.09556, section 3.4).
    * ``soft_min_snr``: gamma / (snr + gamma) (Crowson et al. 2024, arXiv:2401.11605).
    * ``p2``: 1 / (1 + snr)^gamma (Choi et al. 2022, arXiv:2204.00227, with k = 1).
    * ``debiased``: 1 / sqrt(snr) (Yu et al. 2023, arXiv:2310.08442).
    * ``snr``: 1, the plain loss of the noise whatever is predicted (Salimans & Ho 2022, arXiv:2202.00512).

    Multiplied by ``noise_per_error`` it is the weight of the squared error of what is predicted. ``none`` is 1 for
    that, whatever is predicted.

    Args:
        kind: which weighting.
        snr: ``[T]`` signal-to-noise ratios alpha^2 / sigma^2: 0 with zero-terminal SNR, infinite without noise.
        noise_per_error: ``[T]``, finite: squared error of the noise over that of what is predicted. 1 for epsilon, snr
            for x0, snr / (snr + 1) for v, and snr / (1 + sqrt(snr))^2 for the velocity of linear flow matching.
        gamma: parameter of Min-SNR, soft Min-SNR and P2; None: 5, 5 and 1.

    Returns:
        ``[T]`` of their dtype, finite. Where snr is 0, the weight is its limit, and 0 for ``debiased`` with epsilon,
        which has none: there the weighted error of x0, sqrt(snr) times its square, vanishes. Then v, x0 and flow have a
        weight of 0 (but for ``none``), so that such a weighting does not train a zero-terminal step.
    """
    if kind == "none":
        return torch.ones_like(snr)
    parameter = GAMMA.get(kind, 1.0) if gamma is None else gamma
    match kind:
        case "min_snr":
            of_noise = (parameter / snr).clamp(max=1.0)
        case "soft_min_snr":
            of_noise = parameter / (snr + parameter)
        case "p2":
            of_noise = (1.0 + snr) ** -parameter
        case "debiased":
            of_noise = torch.where(snr > 0, snr.rsqrt(), 0.0)
        case "snr":
            return noise_per_error
    return of_noise * noise_per_error


def snr_weights(kind: str, table: Tensor, snr: Tensor, gamma: float | None) -> Tensor:
    """Weight of the squared error of the prediction for a weighting that is a function of the SNR.

    Args:
        kind: as in ``loss_weights``.
        table: ``[R, 4]`` rows.
        snr: ``[R]`` signal-to-noise ratios.
        gamma: parameter of the weighting; None: its usual one.

    Returns:
        ``[R]`` of the dtype of ``table``, finite.
    """
    return loss_weights(kind, snr, noise_per_error(table), gamma)  # type: ignore[arg-type]
