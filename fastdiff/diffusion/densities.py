"""Densities of noise levels, each as the quantile function of a uniform number.

Esser et al. 2024 (arXiv:2403.03206), section 3.1, and Karras et al. 2022 (arXiv:2206.00364), table 1. Each function
ascends with its first argument, so that numbers that are spread evenly give levels that are spread as the density says.
It takes uniform numbers in [0, 1), fp32 or fp64 of any shape, and returns levels of the same shape and dtype.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SMALLEST = 2.0**-25
"""Stands for 0, which philox can give and whose normal quantile is infinite: the middle of its rounding interval."""
_LARGEST = 1.0 - 2.0**-24
"""Largest fp32 below 1."""


def logit_normal(u: Tensor, mean: float, std: float) -> Tensor:
    """Levels t in [0, 1) whose logits are normal (Esser et al. 2024)."""
    return _below_one(torch.sigmoid(mean + std * _normal(u)))


def mode(u: Tensor, scale: float) -> Tensor:
    """Levels t in [0, 1) of the density with heavy tails (ibid.), for ``scale`` from -1 to 2 / (pi - 2).

    There t = 1 - u - s (cos^2(pi u / 2) - 1 + u), which falls with u. Of 1 - u instead, as likely, it is the following.
    """
    return _below_one(u - scale * (torch.sin(math.pi / 2 * u) ** 2 - u))


def cosmap(u: Tensor) -> Tensor:
    """Levels t in [0, 1) for which the log-SNR of the linear path is spread as that of the cosine schedule (ibid.).

    There t = 1 - 1 / (tan(pi u / 2) + 1).
    """
    sine, cosine = torch.sin(math.pi / 2 * u), torch.cos(math.pi / 2 * u)
    return _below_one(sine / (sine + cosine))


def log_normal(u: Tensor, mean: float, std: float) -> Tensor:
    """Levels sigma > 0, whose natural logarithms are normal (Karras et al. 2022, table 1)."""
    return torch.exp(mean + std * _normal(u))


def shift(t: Tensor, k: float) -> Tensor:
    """Levels t in [0, 1] moved towards noise for ``k > 1`` (Esser et al. 2024, section 5.3.2)."""
    return (k * t / (1.0 + (k - 1.0) * t)).clamp(max=1.0)


def _normal(u: Tensor) -> Tensor:
    """Standard normal quantiles, finite."""
    quantiles: Tensor = torch.special.ndtri(u.clamp(_SMALLEST, _LARGEST))
    return quantiles


def _below_one(t: Tensor) -> Tensor:
    """Rounding may reach the ends or pass them; ddpm needs floor(t * T) to be a timestep."""
    return t.clamp(0.0, _LARGEST)
