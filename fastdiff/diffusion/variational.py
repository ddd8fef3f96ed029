"""Variational bound of ddpm in bits per dimension, and the variances of its reverse steps.

The bound on -log p(x0) is a sum over the timesteps (Ho et al. 2020, arXiv:2006.11239, eq. 5). With the posterior of the
forward process q, N(mean, var), and the reverse step of the model p, N(mean', var'), the terms per dimension are::

    t = 0:  -log p(x0 | x_1), for the 8-bit bin around x0
    t > 0:  KL(q || p) = ((var + (mean - mean')^2) / var' - 1 + log(var' / var)) / 2

``mean - mean'`` is not computed as a difference of two almost equal means. Both are linear in the prediction target, so
it equals ``k * (target - prediction)`` with a factor k per timestep. At t = 0 the posterior mean is x0, so the same
expression is ``x0 - mean'``. Likewise ``log(var' / var)`` comes from float64 tables.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.diffusion.ddpm import coefficients
from fastdiff.diffusion.levels import TARGET_NOISE, TARGET_X0, clean_per_error
from fastdiff.diffusion.schedules import Schedule

_HALF_BIN = 1.0 / 255.0
"""Half of the distance between adjacent 8-bit values in [-1, 1]."""
_EDGE = 0.999
"""Values beyond it are in the first or the last bin, which reach to infinity."""
_SMALLEST_PROBABILITY = 1e-12
_CDF_SLOPE, _CDF_CUBIC = math.sqrt(8.0 / math.pi), 0.044715
_FAR = 30.0
"""Standard deviations beyond which the cdf is 0 or 1 in fp32; its cube is still finite."""
_SMALL = 0.25
_LARGEST_LOG_VARIANCE = 80.0
"""Beyond plus or minus this value a bin has the probability 0 or 1 in fp32; its exponential is finite."""


class Variational:
    """Terms of the bound on the negative log-likelihood; ConfigError: unknown schedule."""

    def __init__(self, config: DdpmConfig, device: torch.device | str) -> None:
        self.config = config
        schedule = Schedule.build(config, "cpu", torch.float64)
        table = coefficients(schedule, config.predicted)
        mean_per_error = schedule.posterior_clean * clean_per_error(table)
        variance = schedule.posterior_variance.clone()
        variance[0] = variance[1]  # the variance at t = 0 is 0, which has no logarithm
        smallest = variance.log()
        range_ = schedule.beta.log() - smallest
        target = table[:, TARGET_X0], table[:, TARGET_NOISE]
        columns = (*target, mean_per_error, smallest, range_, 1.0 / variance)
        self._columns = [column.to(device=device, dtype=torch.float32) for column in columns]
        factors = {"mse": 1.0, "rescaled_mse": config.timesteps / 1000.0, "kl": 1.0, "rescaled_kl": config.timesteps}
        self._factor = factors[config.loss]

    def loss(
        self, prediction: Tensor, clean: Tensor, noise: Tensor, time: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the part of ``config.loss`` that is a bound.

        With ``mse`` and ``rescaled_mse`` the bound trains only the variance; its mean is detached (Nichol & Dhariwal
        2021, arXiv:2102.09672, eq. 16). The term of the timestep has the factor 1 for ``mse`` and T / 1000 for
        ``rescaled_mse``, the hybrid loss of the paper (0.001 times the sum of T terms). ``kl`` is the term with its
        mean; ``rescaled_kl`` is T times this, an unbiased estimate of the bound.

        Args:
            prediction: ``[B, C, H, W]`` or, if the variance is learned, ``[B, 2C, H, W]``; fp32, bf16 or fp16.
            clean: ``[B, C, H, W]`` fp32 x0.
            noise: ``[B, C, H, W]`` fp32; the model saw ``alpha * clean + sigma * noise``.
            time: ``[B]`` int64 timesteps.
            mask: ``[B, H, W]``, factor of the bound at each position; None: 1.

        Returns:
            ``[B]`` fp32, bits per dimension times the factor.
        """
        error = self.error(prediction, clean, noise, time)
        if not self.config.is_bound:
            error = error.detach()
        _, _, mean_per_error, *_ = self._at(time)
        return self._factor * self.bits(mean_per_error * error, prediction, clean, time, mask)

    def error(self, prediction: Tensor, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return target minus prediction, ``[B, C, H, W]`` fp32; arguments as in ``loss``."""
        a, b, *_ = self._at(time)
        return a * clean + b * noise - prediction[:, : clean.shape[1]].float()

    def bits(
        self, mean_error: Tensor, prediction: Tensor, clean: Tensor, time: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the term of each sample's timestep, in bits per dimension, averaged over the dimensions.

        Args:
            mean_error: ``[B, C, H, W]`` fp32, mean of the posterior minus mean of the reverse step.
            prediction: as in ``loss``; for a learned variance, its second half is the variance.
            clean: ``[B, C, H, W]`` fp32.
            time: ``[B]`` int64.
            mask: as in ``loss``.

        Returns:
            ``[B]`` fp32.
        """
        *_, smallest, range_, precision = self._at(time)
        first = (time == 0).view(-1, 1, 1, 1)
        above = self._log_variance_above_smallest(prediction[:, clean.shape[1] :].float(), smallest, range_, first)
        decoded = -log_probability(clean, mean_error, smallest + above)
        # The branch not taken gets inputs with a finite value and gradient: 0 times inf is NaN.
        above = torch.where(first, 0.0, above)
        square = mean_error.square() * torch.where(first, 0.0, precision)
        divergence = 0.5 * (_exp_beyond_linear(-above) + torch.exp(-above) * square)
        terms = torch.where(first, decoded, divergence)
        if mask is not None:
            terms = terms * mask[:, None]  # [B, H, W] -> [B, 1, H, W]
        return terms.mean(dim=(1, 2, 3)) / math.log(2.0)

    def _log_variance_above_smallest(self, given: Tensor, smallest: Tensor, range_: Tensor, first: Tensor) -> Tensor:
        """Return log(variance of the reverse step / variance of the posterior); the latter is the smallest.

        ``fixed_small``: the variance of the posterior; ``fixed_large``: beta. At t = 0 the posterior has the variance
        0, and both use its variance at t = 1. ``learned``: ``given`` is the logarithm. ``learned_range``:
        ``f * log(beta) + (1 - f) * log(posterior)`` with ``f = (given + 1) / 2`` (Nichol & Dhariwal 2021, eq. 15).
        """
        if self.config.variance == "fixed_small":
            return torch.zeros_like(smallest)
        if self.config.variance == "fixed_large":
            return torch.where(first, 0.0, range_)
        return given - smallest if self.config.variance == "learned" else 0.5 * (given + 1.0) * range_

    def _at(self, time: Tensor) -> list[Tensor]:
        """Return the tables at ``[B]`` timesteps, ``[B, 1, 1, 1]`` each.

        a and b of the target, error of the mean per error of the prediction, log(smallest variance), log(largest /
        smallest variance), 1 / smallest variance.
        """
        return [column[time].view(-1, 1, 1, 1) for column in self._columns]


def log_probability(value: Tensor, error: Tensor, log_variance: Tensor) -> Tensor:
    """Return the log probability of a Gaussian for the 8-bit bin around a value in [-1, 1].

    Ho et al. 2020, eq. 13: the bin extends 1/255 to both sides, the first and the last bin to infinity. To give the
    same numbers as Nichol & Dhariwal and DiT, the cdf is the approximation ``sigmoid(sqrt(8 / pi) * (x + 0.044715 *
    x^3))``, and a probability is at least 1e-12, below which there is no gradient. The logarithm of a difference of two
    such sigmoids is a sum of three terms without cancellation, so fp32 is exact in the tails, too. Latents have no
    bins, so for them this is no likelihood; DiT uses it as its loss all the same.

    Args:
        value: ``[...]`` fp32.
        error: ``[...]`` fp32, value minus mean of the Gaussian.
        log_variance: broadcastable; the result and its gradient are finite for any value.

    Returns:
        ``[...]`` fp32, natural logarithm.
    """
    limit = _LARGEST_LOG_VARIANCE
    per_deviation = torch.exp(-0.5 * log_variance.clamp(-limit, limit))
    upper = (per_deviation * (error + _HALF_BIN)).clamp(-_FAR, _FAR)
    lower = (per_deviation * (error - _HALF_BIN)).clamp(-_FAR, _FAR)
    below_upper = F.logsigmoid(_cdf_logit(upper))
    above_lower = F.logsigmoid(-_cdf_logit(lower))
    width = (2.0 * _HALF_BIN * per_deviation).clamp(_SMALLEST_PROBABILITY**2, 2.0 * _FAR)
    logits = _CDF_SLOPE * width * (1.0 + _CDF_CUBIC * (upper**2 + upper * lower + lower**2))
    inside = below_upper + above_lower + torch.log(-torch.expm1(-logits))
    result = torch.where(value < -_EDGE, below_upper, torch.where(value > _EDGE, above_lower, inside))
    return result.clamp(min=math.log(_SMALLEST_PROBABILITY))


def _exp_beyond_linear(x: Tensor) -> Tensor:
    """Return ``exp(x) - 1 - x``, in fp32 exact for small ``x``, too: beta and posterior variance are close."""
    small = x.clamp(-_SMALL, _SMALL)
    series = torch.ones_like(small)
    for n in range(8, 2, -1):  # x^2 / 2 * (1 + x / 3 * (1 + x / 4 * ...
        series = 1.0 + small / n * series
    return torch.where(x.abs() < _SMALL, 0.5 * small.square() * series, torch.expm1(x) - x)


def _cdf_logit(deviations: Tensor) -> Tensor:
    return _CDF_SLOPE * (deviations + _CDF_CUBIC * deviations**3)
