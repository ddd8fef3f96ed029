"""Noise schedules: beta tables and the tables derived from them, computed in float64.

Abar is the running product of 1 - beta; ``x_t = sqrt(abar) * x0 + sqrt(1 - abar) * noise`` (Ho et al. 2020,
arXiv:2006.11239, eq. 4). The tables are rounded to fp32 once, at the end, and never to the dtype of the latents: in
bf16 abar of the first steps is exactly 1, so these steps would add no noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig

LARGEST_BETA = 0.999
"""Cap of the last betas of schedules that are defined by abar (Nichol & Dhariwal 2021, section 3.2)."""

_FIRST, _LAST = 1e-4, 0.02
"""First and last beta at T = 1000 (Ho et al. 2020, section 4)."""


def betas(config: DdpmConfig) -> Tensor:
    """Return the variance that each step adds.

    * ``linear``: 1e-4 to 0.02 at T = 1000 (Ho et al. 2020, section 4), scaled by 1000/T for another T (as in
      the code of Nichol & Dhariwal 2021, arXiv:2102.09672).
    * ``quad``: linear in sqrt(beta); ``const``: the last beta; ``warmup10``, ``warmup50``: linear over the first 10 %
      or 50 %, then constant; each with the ends of ``linear`` (code of Ho et al. 2020).
    * ``jsd``: 1/T, 1/(T-1), ..., 1 (same code; abar decreases linearly to 0).
    * ``scaled_linear``: linear in sqrt(beta), 0.00085 to 0.012 for every T (Stable Diffusion).
    * ``cosine``: Nichol & Dhariwal 2021, eq. 17.
    * ``sigmoid``: logistic function on [-6, 6], from 1e-4 to 0.02 for every T (GeoDiff: Xu et al. 2022,
      arXiv:2203.02923, as in diffusers).
    * ``laplace``: log SNR of a Laplace distribution of scale 0.5 (Hang & Gu 2024, arXiv:2407.03297), as in diffusers,
      where sqrt(snr / (1 + snr)) is abar, not its root, so that abar ends at 0.03.

    Args:
        config: ``schedule``, ``timesteps`` and ``zero_terminal_snr`` are read.

    Returns:
        ``[timesteps]`` float64 on the CPU, each in (0, 1); the last is 1 with ``zero_terminal_snr`` and for ``jsd``.
    """
    steps, scale = config.timesteps, 1000.0 / config.timesteps
    usual = (_FIRST * scale, _LAST * scale)
    table = _TABLES[config.schedule](*_ENDS.get(config.schedule, usual), steps)
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
    """Tables indexed by timestep, ``[T]``."""

    alpha: Tensor
    """sqrt(abar): factor of the clean latents."""
    sigma: Tensor
    """sqrt(1 - abar): factor of the noise; above 0 at every step."""
    snr: Tensor
    """abar / (1 - abar): signal-to-noise ratio; exactly 0 at the last step with zero-terminal SNR or ``jsd``."""
    beta: Tensor
    """Variance that the step adds; 1 where the SNR is 0."""
    posterior_variance: Tensor
    """Variance of q(x_{t-1} | x_t, x0) (Ho et al. 2020, eq. 7); exactly 0 at t = 0."""
    posterior_clean: Tensor
    """Factor of x0 in the mean of q(x_{t-1} | x_t, x0)."""
    posterior_noisy: Tensor
    """Factor of x_t in the mean of q(x_{t-1} | x_t, x0)."""

    @staticmethod
    def build(config: DdpmConfig, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Schedule:
        """Return the tables of ``config``, computed in float64, rounded to ``dtype`` and copied to ``device`` once.

        All are finite, also where the last step is pure noise (zero-terminal SNR, ``jsd``): there abar and SNR are
        exactly 0, and the posterior does not depend on x_t.
        """
        beta = betas(config)
        logs = torch.log1p(-beta).cumsum(0)
        before = torch.cat([torch.zeros_like(logs[:1]), logs[:-1]])
        # 1 - abar by expm1: a subtraction from 1 would cancel in the first steps.
        rest, rest_before = 0.0 - torch.expm1(logs), 0.0 - torch.expm1(before)
        exact = (
            (logs / 2).exp(),
            rest.sqrt(),
            logs.exp() / rest,
            beta,
            beta * rest_before / rest,
            beta * (before / 2).exp() / rest,
            rest_before * (1.0 - beta).sqrt() / rest,
        )
        return Schedule(*(table.to(device=device, dtype=dtype) for table in exact))


def alpha_bar_of(scheduler: Mapping[str, Any]) -> Tensor:
    """Return the product of 1 - beta, ``[T]`` float64, of a ``scheduler_config.json``; empty: only diffusers has it."""
    start, end = float(scheduler.get("beta_start", _FIRST)), float(scheduler.get("beta_end", _LAST))
    steps = int(scheduler.get("num_train_timesteps", 1000))
    if scheduler.get("trained_betas") is not None:
        table = torch.tensor(scheduler["trained_betas"], dtype=torch.float64)
    else:
        name = _OF_DIFFUSERS.get(scheduler.get("beta_schedule", "linear"))
        if name is None:
            return torch.empty(0, dtype=torch.float64)
        table = _TABLES[name](start, end, steps)
    table = zero_terminal_snr(table) if scheduler.get("rescale_betas_zero_snr") else table
    return torch.cumprod(1.0 - table, 0)


def _ramp(start: float, end: float, steps: int) -> Tensor:
    return torch.linspace(start, end, steps, dtype=torch.float64)


def _ramp_of_roots(start: float, end: float, steps: int) -> Tensor:
    return _ramp(math.sqrt(start), math.sqrt(end), steps) ** 2


def _warmup(start: float, end: float, steps: int, rising: int) -> Tensor:
    table = torch.full((steps,), end, dtype=torch.float64)
    table[:rising] = _ramp(start, end, rising)
    return table


def _sigmoid(start: float, end: float, steps: int) -> Tensor:
    return torch.sigmoid(_ramp(-6.0, 6.0, steps)) * (end - start) + start


def _of_alpha_bar(alpha_bar: Callable[[Tensor], Tensor], steps: int) -> Tensor:
    """Return the betas for abar as a function of t / T, known up to a constant factor."""
    values = alpha_bar(torch.arange(steps + 1, dtype=torch.float64) / steps)
    return (1.0 - values[1:] / values[:-1]).clamp(max=LARGEST_BETA)


def _cosine(time: Tensor) -> Tensor:
    return torch.cos((time + 0.008) / 1.008 * (math.pi / 2)) ** 2


def _laplace(time: Tensor) -> Tensor:
    from_middle = 0.5 - time
    # 1e-6 keeps the ends finite.
    size = -0.5 * torch.log(1.0 - 2.0 * from_middle.abs() + 1e-6)
    snr = torch.where(from_middle < 0, -size, size).exp()
    return (snr / (1.0 + snr)).sqrt()


_TABLES: dict[str, Callable[[float, float, int], Tensor]] = {
    "linear": _ramp,
    "quad": _ramp_of_roots,
    "const": lambda start, end, steps: torch.full((steps,), end, dtype=torch.float64),
    "warmup10": lambda start, end, steps: _warmup(start, end, steps, steps // 10),
    "warmup50": lambda start, end, steps: _warmup(start, end, steps, steps // 2),
    "jsd": lambda start, end, steps: 1.0 / torch.arange(steps, 0, -1, dtype=torch.float64),
    "scaled_linear": _ramp_of_roots,
    "cosine": lambda start, end, steps: _of_alpha_bar(_cosine, steps),
    "sigmoid": _sigmoid,
    "laplace": lambda start, end, steps: _of_alpha_bar(_laplace, steps),
    "exp": lambda start, end, steps: _of_alpha_bar(lambda time: torch.exp(-12.0 * time), steps),
}
"""Betas by name of the schedule, for its first and last beta and T; diffusers alone has ``exp``."""
_ENDS = {"scaled_linear": (0.00085, 0.012), "sigmoid": (_FIRST, _LAST)}
"""First and last beta of schedules whose ends are those for every T."""
_OF_DIFFUSERS = {name: name for name in ("linear", "scaled_linear", "sigmoid", "laplace", "exp")} | {
    "squaredcos_cap_v2": "cosine"
}
