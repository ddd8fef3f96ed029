"""Discrete denoising diffusion (Ho et al. 2020, arXiv:2006.11239): T steps with tabulated coefficients."""

import torch
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig, Prediction
from fastdiff.diffusion.levels import Levels, rows, snr_weights
from fastdiff.diffusion.schedules import Schedule
from fastdiff_kernels.noising import uniform_time

_USUAL_STEPS = 1000.0
"""Scale of the time that improved-diffusion passes to its models, for any T."""


class Ddpm:
    """Tables of a run; ``native`` levels are timesteps, int64 in [0, T). ConfigError: unknown schedule."""

    def __init__(self, config: DdpmConfig, device: torch.device | str) -> None:
        schedule = Schedule.build(config, "cpu", torch.float64)
        table = coefficients(schedule, config.predicted)
        kind = config.weighted
        weights = torch.ones_like(schedule.snr)
        if kind != "none":
            gamma = config.p2_gamma if kind == "p2" else config.min_snr_gamma
            weights = snr_weights(kind, table, schedule.snr, gamma)
        self._config = config
        depth = torch.arange(len(table), dtype=torch.float64) / len(table)
        self.table, self.weights, self.log_snr, self.depth = (
            values.to(device=device, dtype=torch.float32) for values in (table, weights, schedule.snr.log(), depth)
        )

    def draw(self, share: Tensor) -> Tensor:
        """Map ``[B]`` fp32 shares in [0, 1) ``-> [B]`` int64 timesteps, uniformly."""
        return uniform_time(share, len(self.table))

    def levels(self, native: Tensor) -> Levels:
        """Return the rows of ``[B]`` int64 timesteps."""
        return Levels(model_time(self._config, native), native, self.table, self.weights, self.log_snr, self.depth)


def model_time(config: DdpmConfig, timestep: Tensor) -> Tensor:
    """Return the model's time input for ``[B]`` int64 timesteps: the same, or fp32 on the scale of 1000 steps."""
    return timestep.float() * (_USUAL_STEPS / config.timesteps) if config.rescale_timesteps else timestep


def coefficients(schedule: Schedule, prediction: Prediction) -> Tensor:
    """Return the ``[T, 4]`` rows (alpha, sigma, a, b) of ``fastdiff.diffusion.levels``.

    Args:
        schedule: in float64.
        prediction: epsilon, x0, v (Salimans & Ho 2022, arXiv:2202.00512, section 4) or previous_x, the mean of
            q(x_{t-1} | x_t, x0) (Ho et al. 2020, eq. 7), an option of Nichol & Dhariwal 2021.
    """
    alpha, sigma = schedule.alpha, schedule.sigma
    zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
    targets = {
        "epsilon": (zero, one),
        "x0": (one, zero),
        "v": (-sigma, alpha),
        "previous_x": (schedule.posterior_clean + schedule.posterior_noisy * alpha, schedule.posterior_noisy * sigma),
    }
    target_x0, target_noise = targets[prediction]
    return rows(alpha=alpha, sigma=sigma, target_x0=target_x0, target_noise=target_noise)
