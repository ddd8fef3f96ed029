"""Noise levels as rows of coefficients, the common input of all processes to the kernels.

A row is ``(alpha, sigma, a, b)``: the model sees ``alpha * x0 + sigma * noise``, and the target is ``a * x0 + b *
noise``. The row alone converts an error of the prediction to an error of x0 or of the noise, because the input is
known exactly: ``x0 error = sigma / (a * sigma - b * alpha) * error`` and ``noise error = -alpha / (a * sigma - b *
alpha) * error``. ``ALPHA``, ``SIGMA``, ``TARGET_X0`` (a) and ``TARGET_NOISE`` (b) name the columns.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fastdiff.batch import Condition

SnrWeighting = Literal["none", "min_snr", "soft_min_snr", "p2", "debiased", "snr"]

GAMMA = {"min_snr": 5.0, "soft_min_snr": 5.0, "p2": 1.0}
"""Default parameter of each weighting that has one."""

ALPHA, SIGMA, TARGET_X0, TARGET_NOISE = range(4)
"""Columns of a table of rows, in the order that the kernels read."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The noise levels of a batch."""

    time: Tensor
    """``[B]``, time input of the model: int64 timesteps, or fp32 times of flow and edm."""
    row: Tensor
    """``[B]`` int64: row of each sample in the table."""
    table: Tensor
    """``[R, 4]`` fp32 rows; ``ALPHA``, ``SIGMA``, ``TARGET_X0`` and ``TARGET_NOISE`` are the columns."""
    weights: Tensor
    """``[R]`` fp32 weight of the squared error of the prediction."""
    log_snr: Tensor
    """``[R]`` fp32 natural logarithm of alpha^2 / sigma^2, for any variance of the data, so that equal noise has equal
    values in every process; -inf for pure noise, inf without noise."""
    depth: Tensor
    """``[R]`` fp32 in [0, 1]: progress towards pure noise in the units of the process (t / T; t; quantile of sigma)."""
    clamped: Tensor | None = None
    """``[R, 3]``, ``clean_factors`` of a prediction whose velocity is clamped (``Flow``); None: those of the rows."""

    def coefficient(self, column: int) -> Tensor:
        """Return ``[B, 1, 1, 1]`` fp32: ``ALPHA``, ``SIGMA``, ``TARGET_X0`` or ``TARGET_NOISE`` of each sample."""
        return self.table[self.row, column].view(-1, 1, 1, 1)

    def clean_factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factors by which a sampler converts a prediction to x0.

        Returns:
            p, q and r, ``[B]`` float64: ``x0 = (p * prediction - q * input) / r``. r is 0 where the prediction does not
            determine x0.
        """
        if self.clamped is not None:
            p, q, r = self.clamped[self.row].double().unbind(dim=1)
            return p, q, r
        rows = self.table[self.row].double()
        return rows[:, SIGMA], rows[:, TARGET_NOISE], determinant(rows)


class Process(Protocol):
    """Noising process. The native form of a level is a timestep (int64), t, or sigma."""

    def draw(self, share: Tensor) -> Tensor:
        """Map ``[B]`` shares in [0, 1) by the process's density ``-> [B]`` native levels, ascending in noise."""

    def levels(self, native: Tensor) -> Levels:
        """Return the rows of ``[B]`` native levels, on their device."""


def rows(*, alpha: Tensor, sigma: Tensor, target_x0: Tensor, target_noise: Tensor) -> Tensor:
    """Stack coefficients ``[R]`` to the table ``[R, 4]``."""
    return torch.stack([alpha, sigma, target_x0, target_noise], dim=1)  # 4 x [R] -> [R, 4]


def determinant(table: Tensor) -> Tensor:
    """Return a * sigma - b * alpha of ``[R, 4]`` rows ``-> [R]``; 0 where the prediction does not determine x0."""
    return table[:, TARGET_X0] * table[:, SIGMA] - table[:, TARGET_NOISE] * table[:, ALPHA]


def clean_per_error(table: Tensor) -> Tensor:
    """Return x0 error per prediction error of ``[R, 4]`` rows ``-> [R]``, signed; infinite for a determinant of 0."""
    # For b = 0 (x0 prediction) sigma cancels: it may be 0 (clean data).
    of_clean_alone = 1.0 / table[:, TARGET_X0]
    return torch.where(table[:, TARGET_NOISE] == 0, of_clean_alone, table[:, SIGMA] / determinant(table))


def noise_per_error(table: Tensor) -> Tensor:
    """Return squared noise error per squared prediction error of ``[R, 4]`` rows ``-> [R]``, finite at pure noise."""
    # For a = 0 (epsilon prediction) alpha cancels: it may be 0 (zero-terminal SNR).
    of_noise_alone = 1.0 / table[:, TARGET_NOISE] ** 2
    return torch.where(table[:, TARGET_X0] == 0, of_noise_alone, (table[:, ALPHA] / determinant(table)) ** 2)


def loss_weights(kind: SnrWeighting, snr: Tensor, noise_per_error: Tensor, gamma: float | None = None) -> Tensor:
    """Return the weight of the squared error at each timestep.

    A kind means the same for every prediction. It is defined for the squared error of the noise, w(snr):

    * ``min_snr``: min(1, gamma / snr) (Hang et al. 2023, arXiv:2303.09556, section 3.4).
    * ``soft_min_snr``: gamma / (snr + gamma) (Crowson et al. 2024, arXiv:2401.11605).
    * ``p2``: 1 / (1 + snr)^gamma (Choi et al. 2022, arXiv:2204.00227, with k = 1).
    * ``debiased``: 1 / sqrt(snr) (Yu et al. 2023, arXiv:2310.08442).
    * ``snr``: 1, the plain loss of the noise for every prediction (Salimans & Ho 2022, arXiv:2202.00512).

    Multiplied by ``noise_per_error`` it is the weight of the squared error of the prediction. ``none`` gives the
    squared error of every prediction the weight 1.

    Args:
        kind: name of the weighting.
        snr: ``[T]`` signal-to-noise ratios alpha^2 / sigma^2: 0 with zero-terminal SNR, infinite without noise.
        noise_per_error: ``[T]``, finite: squared error of the noise per squared error of the prediction. 1 for epsilon,
            snr for x0, snr / (snr + 1) for v, and snr / (1 + sqrt(snr))^2 for the velocity of linear flow matching.
        gamma: parameter of Min-SNR, soft Min-SNR and P2; None: 5, 5 and 1.

    Returns:
        ``[T]`` of the dtype of ``snr``, finite. At snr = 0 the weight is its limit. ``debiased`` with epsilon has no
        limit there; its weight is 0, because the equivalent weight of x0, sqrt(snr), vanishes. At snr = 0 v, x0 and
        flow have a weight of 0 (except for ``none``), so these weightings do not train a zero-terminal step.
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
    """Return the weight of the squared error of the prediction for a weighting that is a function of the SNR.

    Args:
        kind: as in ``loss_weights``.
        table: ``[R, 4]`` rows.
        snr: ``[R]`` signal-to-noise ratios.
        gamma: parameter of the weighting; None: its default.

    Returns:
        ``[R]`` of the dtype of ``table``, finite.
    """
    return loss_weights(kind, snr, noise_per_error(table), gamma)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Corruption:
    """Noisy input of the model, ``alpha * x0 + sigma * noise``. The noise is not stored: the loss draws it again."""

    noisy: Tensor
    """``[B, C, H, W]`` x_t, fp32 unless the objective was built with another dtype."""
    levels: Levels
    """The drawn noise levels."""
    condition: Condition
    """Condition after dropout for classifier-free guidance (dropped: the null condition)."""
    correction: Tensor | None = None
    """``[B, C, H, W]`` fp32, added to the target (multi-resolution noise, DREAM); None: no correction."""
    importance: Tensor | None = None
    """``[B]`` fp32 weight of each sample's loss, for unevenly drawn levels; None: 1."""

    @property
    def time(self) -> Tensor:
        """``[B]``, time input of the model."""
        return self.levels.time
