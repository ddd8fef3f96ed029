"""Flow matching and stochastic interpolants: continuous time, t = 0 the data and t = 1 pure noise.

Lipman et al. 2023 (arXiv:2210.02747); Ma et al. 2024, SiT (arXiv:2401.08740); Esser et al. 2024, Stable Diffusion 3
(arXiv:2403.03206), whose direction of time this is. That of SiT is the other one: its t is 1 - t here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastdiff.config.objective import FlowConfig, FlowPath
from fastdiff.diffusion.levels import ALPHA, SIGMA, Levels, noise_per_error, rows, snr_weights

TIME_SCALE = 1000.0
"""The model is told 1000 t, as in Stable Diffusion 3: its embedding of time is made for numbers up to 1000."""

_BETA_MIN, _BETA_MAX = 0.1, 20.0
"""Of the vp path (Song et al. 2021, arXiv:2011.13456, appendix C)."""


class Flow:
    """The path from data to noise; ``native`` levels are t, fp32 in ``interval``, which may be given on any device.

    Args:
        config: path, prediction and weighting.
    """

    interval: tuple[float, float]
    """Ends of t. Where coefficients or weights would be infinite, they are those of SiT: without the last 1e-5 before
    the data on the vp path (sigma' is infinite there), and without 1e-3 at both ends of the others if epsilon or the
    score is predicted. With ``sigma_sqrt`` t begins at 1e-3, the smallest of the 1000 levels of Stable Diffusion 3,
    because the mean of sigma^-2 over (0, 1) is infinite."""

    def __init__(self, config: FlowConfig) -> None:
        self._path, self._prediction = config.path, config.predicted
        self._weighting, self._gamma = config.weighted, config.min_snr_gamma
        if config.path == "vp":
            self.interval = (1e-5, 1.0)
        elif config.predicted != "flow":
            self.interval = (1e-3, 1.0 - 1e-3)
        else:
            self.interval = (1e-3 if config.weighted == "sigma_sqrt" else 0.0, 1.0)

    def draw(self, share: Tensor) -> Tensor:
        """``[B]`` fp32 shares in [0, 1] ``-> [B]`` t, evenly over ``interval``."""
        low, high = self.interval
        return low + (high - low) * share

    def levels(self, native: Tensor) -> Levels:
        """The rows of ``[B]`` t, one for each sample."""
        alpha, sigma, alpha_slope, sigma_slope = interpolant(self._path, native)
        zero, one = torch.zeros_like(native), torch.ones_like(native)
        if self._prediction == "flow":
            target_x0, target_noise = alpha_slope, sigma_slope
        else:
            target_x0, target_noise = zero, (one if self._prediction == "epsilon" else -1.0 / sigma)
        table = rows(alpha=alpha, sigma=sigma, target_x0=target_x0, target_noise=target_noise)
        log_snr = 2.0 * (alpha.log() - sigma.log())
        # Of sigma = 0 the SNR is infinite, and min_snr and soft_min_snr are 0, as they should.
        weights = self._weights(table, (alpha / sigma) ** 2, sigma * alpha_slope - alpha * sigma_slope)
        row = torch.arange(len(native), device=native.device)
        return Levels(TIME_SCALE * native, row, table, weights, log_snr, depth=native)

    def _weights(self, table: Tensor, snr: Tensor, turn: Tensor) -> Tensor:
        """Weights of the squared error of the prediction: ``[B]``.

        ``velocity`` and ``likelihood`` are (g / sigma)^2 and g / sigma^2 for the error of the noise, where
        g = sigma sigma' - sigma^2 alpha' / alpha (Ma et al. 2024, as in the code of SiT). For the score a weighting
        is of the error of sigma times the score, even without one, there too.

        Args:
            table: ``[B, 4]``.
            snr: ``[B]``, inf without noise.
            turn: ``[B]``, sigma alpha' - alpha sigma' = -alpha g / sigma.
        """
        alpha, sigma = table[:, ALPHA], table[:, SIGMA]
        match self._weighting:
            case "none":
                return noise_per_error(table) if self._prediction == "score" else torch.ones_like(sigma)
            case "sigma_sqrt":
                return sigma**-2
            case "cosmap":
                return 2.0 / (math.pi * (1.0 - 2.0 * sigma + 2.0 * sigma**2))
            case "velocity":
                return (turn / alpha) ** 2 * noise_per_error(table)
            case "likelihood":
                return -turn / (alpha * sigma) * noise_per_error(table)
            case kind:
                return snr_weights(kind, table, snr, self._gamma)


def interpolant(path: FlowPath, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """alpha, sigma and their derivatives by t, each of the shape and dtype of ``t`` and relatively exact.

    ``linear``: 1 - t and t. ``gvp``: cos(pi t / 2) and sin(pi t / 2). ``vp``: exp(l) and sqrt(1 - exp(2 l)) for
    l = -t^2 (20 - 0.1) / 4 - 0.1 t / 2, whose sigma' is infinite at t = 0.

    Args:
        path: as above (Ma et al. 2024).
        t: in [0, 1], above 0 for vp.
    """
    if path == "linear":
        one = torch.ones_like(t)
        return 1.0 - t, t, -one, one
    if path == "gvp":
        # A cosine near its zero would be as inexact as pi is.
        alpha, sigma = torch.sin(math.pi / 2 * (1.0 - t)), torch.sin(math.pi / 2 * t)
        return alpha, sigma, -math.pi / 2 * sigma, math.pi / 2 * alpha
    exponent = -t * (t * (_BETA_MAX - _BETA_MIN) / 4 + _BETA_MIN / 2)
    slope = -(t * (_BETA_MAX - _BETA_MIN) + _BETA_MIN) / 2
    alpha, sigma = exponent.exp(), (-torch.expm1(2.0 * exponent)).sqrt()
    return alpha, sigma, alpha * slope, -slope * alpha**2 / sigma
