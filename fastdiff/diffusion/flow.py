"""Flow matching and stochastic interpolants: continuous time, data at t = 0 and pure noise at t = 1.

Lipman et al. 2023 (arXiv:2210.02747); Ma et al. 2024, SiT (arXiv:2401.08740); Esser et al. 2024, Stable Diffusion 3
(arXiv:2403.03206). The direction of time is that of Stable Diffusion 3; SiT's t is 1 - t here. Only the network's time
input and the sign of its velocity follow ``FlowConfig.convention``; the loss is the same in all.

Prediction x0 has the loss of the velocity (Li & He 2025, JiT, arXiv:2511.13720). Of ``z = alpha x0 + sigma noise``
follows ``velocity = (sigma' z - d x0) / sigma`` with ``d = sigma' alpha - sigma alpha'``, which is 1 on the linear
path. Both the true and the predicted velocity are divided by ``max(sigma, velocity_floor)`` instead, so the loss is
``(d / max(sigma, velocity_floor))^2`` times the squared error of x0. A sampler follows the clamped velocity as well:
below the floor a step from sigma to 0 covers the part ``sigma / velocity_floor`` of the way to the predicted x0.
"""

import math

import torch
from torch import Tensor

from fastdiff.config.sections.objective import FlowConfig, FlowPath
from fastdiff.diffusion.levels import ALPHA, SIGMA, Levels, clean_per_error, noise_per_error, rows, snr_weights

_BETA_MIN, _BETA_MAX = 0.1, 20.0
"""Ends of beta on the vp path (Song et al. 2021, arXiv:2011.13456, appendix C)."""


class Flow:
    """Path from data to noise; ``native`` levels are t, fp32 in ``interval``, on any device."""

    interval: tuple[float, float]
    """Range of t; as in SiT it leaves out the ends where coefficients or weights are infinite. The vp path starts at
    1e-5 (sigma' is infinite at 0). The other paths leave out 1e-3 at both ends for epsilon and score prediction, and
    for x0 unless its loss is the clamped velocity's. With ``sigma_sqrt`` t starts at 1e-3, the smallest of the 1000
    levels of Stable Diffusion 3, because the mean of sigma^-2 over (0, 1) is infinite."""

    def __init__(self, config: FlowConfig) -> None:
        self._path, self._prediction, self._time = config.path, config.predicted, config.time
        self._weighting, self._gamma, self._floor = config.weighted, config.min_snr_gamma, config.velocity_floor
        if config.path == "vp":
            self.interval = (1e-5, 1.0)
        elif config.predicted != "flow" and (config.predicted, config.weighted) != ("x0", "velocity"):
            self.interval = (1e-3, 1.0 - 1e-3)
        else:
            self.interval = (1e-3 if config.weighted == "sigma_sqrt" else 0.0, 1.0)

    def draw(self, share: Tensor) -> Tensor:
        """Map ``[B]`` fp32 shares in [0, 1] ``-> [B]`` t, uniform over ``interval``."""
        low, high = self.interval
        return low + (high - low) * share

    def levels(self, native: Tensor) -> Levels:
        """Return one row per ``[B]`` t."""
        alpha, sigma, alpha_slope, sigma_slope = interpolant(self._path, native)
        zero, one = torch.zeros_like(native), torch.ones_like(native)
        determinant = sigma * alpha_slope - alpha * sigma_slope
        clamped = None
        match self._prediction:
            case "flow":
                towards = 1.0 if self._time.to_noise else -1.0
                target_x0, target_noise = towards * alpha_slope, towards * sigma_slope
            case "x0":
                target_x0, target_noise = one, zero
                floored = sigma.clamp(min=self._floor)
                # The x0 whose exact velocity is the clamped one of the prediction.
                clamped = torch.stack([sigma, sigma_slope / determinant * (floored - sigma), floored], dim=1)  # [B, 3]
            case "epsilon":
                target_x0, target_noise = zero, one
            case _:
                target_x0, target_noise = zero, -1.0 / sigma
        table = rows(alpha=alpha, sigma=sigma, target_x0=target_x0, target_noise=target_noise)
        log_snr = 2.0 * (alpha.log() - sigma.log())
        # At sigma = 0 the SNR is infinite, so that min_snr and soft_min_snr are correctly 0.
        weights = self._weights(table, (alpha / sigma) ** 2, determinant)
        row = torch.arange(len(native), device=native.device)
        time = self._time.at_data + (self._time.at_noise - self._time.at_data) * native
        return Levels(time, row, table, weights, log_snr, depth=native, clamped=clamped)

    def _weights(self, table: Tensor, snr: Tensor, determinant: Tensor) -> Tensor:
        """Return the weights ``[B]`` of the squared error of the prediction.

        ``velocity`` and ``likelihood`` are (g / sigma)^2 and g / sigma^2 for the error of the noise, where
        g = sigma sigma' - sigma^2 alpha' / alpha (Ma et al. 2024, as in the code of SiT). For score prediction, as
        in SiT, every weighting, also ``none``, applies to the error of sigma times the score. ``velocity`` for x0 is
        that of the module's docstring.

        Args:
            table: ``[B, 4]``.
            snr: ``[B]``, inf without noise.
            determinant: ``[B]``, sigma alpha' - alpha sigma' = -alpha g / sigma.
        """
        alpha, sigma = table[:, ALPHA], table[:, SIGMA]
        match self._weighting:
            case "none":
                return noise_per_error(table) if self._prediction == "score" else torch.ones_like(sigma)
            case "sigma_sqrt":
                return sigma**-2
            case "cosmap":
                return 2.0 / (math.pi * (1.0 - 2.0 * sigma + 2.0 * sigma**2))
            case "x0":
                return clean_per_error(table) ** 2
            case "velocity" if self._prediction == "x0":
                return (determinant / sigma.clamp(min=self._floor)) ** 2
            case "velocity":
                return (determinant / alpha) ** 2 * noise_per_error(table)
            case "likelihood":
                return -determinant / (alpha * sigma) * noise_per_error(table)
            case kind:
                return snr_weights(kind, table, snr, self._gamma)


def interpolant(path: FlowPath, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return alpha, sigma and their derivatives by t, each with the shape and dtype of ``t`` and relatively exact.

    ``linear``: 1 - t and t. ``gvp``: cos(pi t / 2) and sin(pi t / 2). ``vp``: exp(l) and sqrt(1 - exp(2 l)) with
    l = -t^2 (20 - 0.1) / 4 - 0.1 t / 2; its sigma' is infinite at t = 0.

    Args:
        path: as above (Ma et al. 2024).
        t: in [0, 1], above 0 for vp.
    """
    if path == "linear":
        one = torch.ones_like(t)
        return 1.0 - t, t, -one, one
    if path == "gvp":
        # The sine of 1 - t: a cosine near its zero is only as exact as pi.
        alpha, sigma = torch.sin(math.pi / 2 * (1.0 - t)), torch.sin(math.pi / 2 * t)
        return alpha, sigma, -math.pi / 2 * sigma, math.pi / 2 * alpha
    exponent = -t * (t * (_BETA_MAX - _BETA_MIN) / 4 + _BETA_MIN / 2)
    slope = -(t * (_BETA_MAX - _BETA_MIN) + _BETA_MIN) / 2
    alpha, sigma = exponent.exp(), (-torch.expm1(2.0 * exponent)).sqrt()
    return alpha, sigma, alpha * slope, -slope * alpha**2 / sigma
