"""Variational bound of a learned variance in the baselines: elementwise, in plain torch and fp32.

Nichol & Dhariwal 2021, arXiv:2102.09672, sections 2.1 and 3.1; the variance is between that of the posterior and beta
(their eq. 15). All values are in bits.
"""

import math

import torch
from torch import Tensor

_HALF_BIN, _EDGE, _LEAST = 1 / 255, 0.999, 1e-12


def log_variance(predicted: Tensor, smallest: Tensor, largest: Tensor) -> Tensor:
    """Interpolate between the logarithms of two variances; ``predicted`` is in [-1, 1]."""
    share = (predicted + 1) / 2
    return share * largest + (1 - share) * smallest


def divergence(error: Tensor, true: Tensor, estimated: Tensor) -> Tensor:
    """Return KL(true || estimated) of Gaussians."""
    nats = 0.5 * (estimated - true + torch.exp(true - estimated) + error**2 * torch.exp(-estimated) - 1.0)
    return nats / math.log(2.0)


def decoder(clean: Tensor, error: Tensor, estimated: Tensor) -> Tensor:
    """Return -log p(x0 | x1) of 8-bit pixels (Ho et al. 2020, arXiv:2006.11239, eq. 13); outermost bins are open."""
    per_deviation = torch.exp(-0.5 * estimated)
    above, below = (_normal_cdf(per_deviation * (error + side)) for side in (_HALF_BIN, -_HALF_BIN))
    inside = torch.where(clean < -_EDGE, above, torch.where(clean > _EDGE, 1.0 - below, above - below))
    return -inside.clamp(min=_LEAST).log() / math.log(2.0)


def _normal_cdf(value: Tensor) -> Tensor:
    """Return the CDF of the standard normal by the usual tanh approximation."""
    return 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (value + 0.044715 * value**3)))
