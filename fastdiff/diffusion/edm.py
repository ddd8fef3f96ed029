"""Variance exploding noise with the preconditioning of Karras et al. 2022 (arXiv:2206.00364), sections 4 and 5.

The denoiser is D(x; sigma) = c_skip x + c_out F(c_in x; c_noise) and its loss lambda |D - x0|^2 with
lambda = 1 / c_out^2 (table 1), which is the plain squared error of F for the target (x0 - c_skip x) / c_out (eq. 8).
"""

import torch
from torch import Tensor

from fastdiff.config.sections.objective import EdmConfig
from fastdiff.diffusion.densities import log_normal
from fastdiff.diffusion.levels import Levels, rows, snr_weights

_LOG_MEAN, _LOG_STD = -1.2, 1.2
"""P_mean and P_std of ln sigma in training (table 1)."""


class Edm:
    """EDM preconditioning; ``native`` levels are sigma, fp32 above 0, on any device.

    Args:
        config: ``sigma_data`` and weighting.
        mean: mean of ln sigma in training; None: the paper's.
        std: standard deviation of ln sigma in training; None: the paper's.
    """

    def __init__(self, config: EdmConfig, mean: float | None = None, std: float | None = None) -> None:
        self._mean = _LOG_MEAN if mean is None else mean
        self._std = _LOG_STD if std is None else std
        self._data = config.sigma_data
        self._weighting, self._gamma = config.weighted, config.min_snr_gamma

    def draw(self, share: Tensor) -> Tensor:
        """Map ``[B]`` shares in [0, 1) ``-> [B]`` log-normal sigma."""
        return log_normal(share, self._mean, self._std)

    def levels(self, native: Tensor) -> Levels:
        """Return one row per ``[B]`` sigma; the model's time input is c_noise = ln(sigma) / 4."""
        sigma, data, logs = native, self._data, native.log()
        scale = 1.0 / torch.hypot(sigma, torch.full_like(sigma, data))  # c_in; hypot, because the squares may overflow
        # (1 - c_skip) / c_out and -c_skip sigma / c_out, without the cancellation.
        target_x0, target_noise = sigma * scale / data, -data * scale
        table = rows(alpha=scale, sigma=sigma * scale, target_x0=target_x0, target_noise=target_noise)
        weights = torch.ones_like(sigma)
        if self._weighting != "none":
            # Crowson et al. 2024 (arXiv:2401.11605), section 3.4: the SNR of latents with variance data^2.
            weights = snr_weights(self._weighting, table, (data / sigma) ** 2, self._gamma)
        row = torch.arange(len(sigma), device=sigma.device)
        quantile = torch.special.ndtr((logs - self._mean) / self._std)
        return Levels(logs / 4, row, table, weights, log_snr=-2.0 * logs, depth=quantile)
