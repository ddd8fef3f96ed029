"""Densities of noise levels, each as the quantile function of a uniform number.

Esser et al. 2024 (arXiv:2403.03206), section 3.1, and Karras et al. 2022 (arXiv:2206.00364), table 1. Each function
increases with its first argument, so that stratified uniform numbers give stratified levels. It takes uniform numbers
in [0, 1), fp32 or fp64 of any shape, and returns levels of the same shape and dtype.
"""

import math

import torch
from torch import Tensor

_SMALLEST = 2.0**-25
"""Replaces 0: philox can return it, and its normal quantile is infinite; the middle of its rounding interval."""
_LARGEST = 1.0 - 2.0**-24
"""Largest fp32 below 1."""


def logit_normal(u: Tensor, mean: float, std: float) -> Tensor:
    """Return levels t in [0, 1) with normal logits (Esser et al. 2024)."""
    return _below_one(torch.sigmoid(mean + std * _normal(u)))


def truncated_logit_normal(u: Tensor, mean: float, std: float, edge: float, kept: tuple[float, float]) -> Tensor:
    """Return levels t of ``logit_normal``, given that they are in [edge, 1 - edge]; ``kept``: its quantiles there."""
    low, high = kept
    # Rounding may pass the ends.
    return logit_normal(low + (high - low) * u, mean, std).clamp(edge, 1.0 - edge)


def mode(u: Tensor, scale: float) -> Tensor:
    """Return levels t in [0, 1) of the heavy-tailed density (ibid.), for ``scale`` from -1 to 2 / (pi - 2).

    The paper's t = 1 - u - s (cos^2(pi u / 2) - 1 + u) decreases with u; here 1 - u replaces u.
    """
    return _below_one(u - scale * (torch.sin(math.pi / 2 * u) ** 2 - u))


def cosmap(u: Tensor) -> Tensor:
    """Return levels t in [0, 1) that give the linear path the log-SNR density of the cosine schedule (ibid.).

    The paper's form is t = 1 - 1 / (tan(pi u / 2) + 1).
    """
    sine, cosine = torch.sin(math.pi / 2 * u), torch.cos(math.pi / 2 * u)
    return _below_one(sine / (sine + cosine))


def log_normal(u: Tensor, mean: float, std: float) -> Tensor:
    """Return levels sigma > 0 with normal natural logarithms (Karras et al. 2022, table 1)."""
    return torch.exp(mean + std * _normal(u))


def shift(t: Tensor, k: float) -> Tensor:
    """Return levels t in [0, 1], shifted towards noise for ``k > 1`` (Esser et al. 2024, section 5.3.2)."""
    return (k * t / (1.0 + (k - 1.0) * t)).clamp(max=1.0)


def _normal(u: Tensor) -> Tensor:
    """Return standard normal quantiles, always finite."""
    quantiles: Tensor = torch.special.ndtri(u.clamp(_SMALLEST, _LARGEST))
    return quantiles


def _below_one(t: Tensor) -> Tensor:
    """Clamp to [0, 1): rounding may reach or pass the ends, and ddpm needs floor(t * T) to be a timestep."""
    return t.clamp(0.0, _LARGEST)
