"""Noise schedules: beta tables and what is derived from them, computed in float64.

Abar is the running product of 1 - beta; ``x_t = sqrt(abar) * x0 + sqrt(1 - abar) * noise`` (Ho et al. 2020,
arXiv:2006.11239, eq. 4). The tables are rounded to fp32 once, at the very end, and never to the dtype of the
latents: in bf16 abar of the first steps is exactly 1, so that those steps would add no noise at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.config import DiffusionConfig

LARGEST_BETA = 0.999
"""Cap of the cosine schedule's last betas (Nichol & Dhariwal 2021, section 3.2)."""


def betas(config: DiffusionConfig) -> Tensor:
    """Variance that each step adds.

    * ``linear``: 1e-4 to 0.02 at T = 1000 (Ho et al. 2020, section 4), scaled by 1000/T for another T (as in
      the code of Nichol & Dhariwal 2021, arXiv:2102.09672).
    * ``scaled_linear``: linear in sqrt(beta), 0.00085 to 0.012 for every T (Stable Diffusion).
    * ``cosine``: Nichol & Dhariwal 2021, eq. 17.

    Args:
        config: ``schedule``, ``timesteps`` and ``zero_terminal_snr`` are read.

    Returns:
        ``[timesteps]`` float64 on the CPU, each in (0, 1); the last is 1 with ``zero_terminal_snr``.
    """
    build = {"linear": _linear, "scaled_linear": _scaled_linear, "cosine": _cosine}[config.schedule]
    table = build(config.timesteps)
    return zero_terminal_snr(table) if config.zero_terminal_snr else table


def zero_terminal_snr(table: Tensor) -> Tensor:
    """Rescale betas so that the last step is pure noise and the first keeps its abar.

    Lin et al. 2023 (arXiv:2305.08891), algorithm 1: sqrt(abar) is shifted and scaled linearly.

    Args:
        table: ``[T]`` float64 betas, T >= 2.

    Returns:
        ``[T]`` float64 betas; the last is exactly 1.
    """
    root = torch.cumprod(1.0 - table, 0).sqrt()
    first, last = root[0], root[-1]
    abar = ((root - last) * (first / (first - last))) ** 2
    before = torch.cat([torch.ones_like(abar[:1]), abar[:-1]])
    return 1.0 - abar / before


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Tables that are gathered by timestep, ``[T]``."""

    alpha: Tensor
    """sqrt(abar): factor of the clean latents."""
    sigma: Tensor
    """sqrt(1 - abar): factor of the noise; above 0 at every step."""
    snr: Tensor
    """abar / (1 - abar): signal-to-noise ratio; exactly 0 at the last step with zero-terminal SNR."""

    @staticmethod
    def build(config: DiffusionConfig, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Schedule:
        """The tables of ``config``, computed in float64, rounded to ``dtype`` and copied to ``device`` once.

        Raises:
            ConfigError: see ``betas``.
        """
        logs = torch.log1p(-betas(config)).cumsum(0)
        # 1 - abar without the cancellation that subtracting from 1 would have in the first steps.
        rest = -torch.expm1(logs)
        exact = ((logs / 2).exp(), rest.sqrt(), logs.exp() / rest)
        alpha, sigma, snr = (table.to(device=device, dtype=dtype) for table in exact)
        return Schedule(alpha=alpha, sigma=sigma, snr=snr)


def _linear(timesteps: int) -> Tensor:
    scale = 1000.0 / timesteps
    return torch.linspace(1e-4 * scale, 0.02 * scale, timesteps, dtype=torch.float64)


def _scaled_linear(timesteps: int) -> Tensor:
    return torch.linspace(math.sqrt(0.00085), math.sqrt(0.012), timesteps, dtype=torch.float64) ** 2


def _cosine(timesteps: int) -> Tensor:
    # The common factor 1 / f(0) of eq. 17 cancels in the ratio.
    time = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
    f = torch.cos((time + 0.008) / 1.008 * (math.pi / 2)) ** 2
    return (1.0 - f[1:] / f[:-1]).clamp(max=LARGEST_BETA)


def alpha_bar_of(scheduler: Mapping[str, Any]) -> Tensor:
    """Running product of 1 - beta that a ``scheduler_config.json`` of diffusers describes.

    Returns:
        ``[num_train_timesteps]`` float64; empty for a schedule that diffusers itself has and this function has not.
    """
    start, end = float(scheduler.get("beta_start", 1e-4)), float(scheduler.get("beta_end", 0.02))
    steps = int(scheduler.get("num_train_timesteps", 1000))
    kind = scheduler.get("beta_schedule", "linear")
    if scheduler.get("trained_betas") is not None:
        table = torch.tensor(scheduler["trained_betas"], dtype=torch.float64)
    elif kind == "linear":
        table = torch.linspace(start, end, steps, dtype=torch.float64)
    elif kind == "scaled_linear":
        table = torch.linspace(math.sqrt(start), math.sqrt(end), steps, dtype=torch.float64) ** 2
    elif kind == "squaredcos_cap_v2":
        table = _cosine(steps)
    else:
        return torch.empty(0, dtype=torch.float64)
    table = zero_terminal_snr(table) if scheduler.get("rescale_betas_zero_snr") else table
    return torch.cumprod(1.0 - table, 0)
