"""How much the squared error of each timestep counts: Min-SNR and its relatives, as a table for ``weighted_mse``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Weighting = Literal["none", "min_snr", "soft_min_snr", "p2", "debiased", "snr"]

GAMMA = {"min_snr": 5.0, "soft_min_snr": 5.0, "p2": 1.0}
"""Where none is given."""


def loss_weights(
    kind: Weighting,
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
