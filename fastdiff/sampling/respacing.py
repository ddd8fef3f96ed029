"""Noise levels that sampling visits, chosen from those of the training; all lists ascend in noise.

* ``trailing``: evenly spaced from the noisiest level on (Lin et al. 2023, arXiv:2305.08891, table 2). The default.
* ``spaced``: the syntax of improved-diffusion and DiT (Nichol & Dhariwal 2021, arXiv:2102.09672, section 4).
* ``flow_shares`` and ``karras_sigmas``: levels of the continuous-time processes.
* ``flow_grid`` and ``stochastic_flow_grid``: levels of flow for solvers in its own time, the end at the data included.
"""

import math
from itertools import accumulate, repeat

import torch
from torch import Tensor

from fastdiff.diffusion import densities
from fastdiff.errors import ConfigError

SIGMA_MIN, SIGMA_MAX, _RHO = 0.002, 80.0, 7
"""Ends and curvature of the sigmas of EDM (Karras et al. 2022, arXiv:2206.00364, table 1)."""

_LAST_STEP = 0.04
"""Length of the last step of a stochastic solver of flow."""


def trailing(timesteps: int, steps: int) -> list[int]:
    """Return ``steps`` (else ConfigError) evenly spaced levels of ``timesteps``; the last one is ``timesteps - 1``."""
    if not 1 <= steps <= timesteps:
        raise ConfigError(f"{steps} sampling steps; choose 1 to {timesteps}, the levels of the training")
    return [-(-timesteps * k // steps) - 1 for k in range(1, steps + 1)]


def spaced(timesteps: int, text: str) -> list[int]:
    """Return exactly the levels that improved-diffusion's ``timestep_respacing`` chooses.

    Args:
        timesteps: levels of the training.
        text: ``250`` takes 250 evenly spaced levels, the first and the last included; ``10,15,20`` takes 10, 15 and 20
            from three equal sections; ``ddim50`` takes every 20th of 1000, from the first on (Song et al. 2021,
            arXiv:2010.02502).

    Raises:
        ConfigError: a malformed text, more levels than there are, or no integer stride that gives this number.
    """
    number = text.removeprefix("ddim")
    if number != text and number.isdecimal():
        return _strided(timesteps, int(number))
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ConfigError(
            f"--respacing {text}: expected a number of steps like 250, numbers for equal sections like 10,15,20, or "
            "an integer stride like ddim50"
        )
    counts = [int(part) for part in text.split(",")]
    if not any(counts):
        raise ConfigError(f"--respacing {text}: no steps at all; expected at least 1")
    size, longer = divmod(timesteps, len(counts))
    chosen: list[int] = []
    start = 0
    for i, count in enumerate(counts):
        end = start + size + (i < longer)
        if count > end - start:
            raise ConfigError(
                f"--respacing {text}: {count} steps from levels {start} to {end - 1}; choose at most {end - start}, "
                "the training levels there"
            )
        chosen += _section(start, end - 1, count)
        start = end
    return chosen


def flow_shares(steps: int, shift: float) -> Tensor:
    """Return ``[steps]`` float64 fractions of the path to noise, even up to 1, shifted as in training."""
    return densities.shift(torch.arange(1, _some(steps) + 1, dtype=torch.float64) / steps, shift)


def flow_grid(steps: int, shift: float) -> Tensor:
    """Return ``[steps + 1]`` float64 fractions of the path to noise, even from 0 to 1, shifted as in training."""
    return densities.shift(torch.arange(_some(steps) + 1, dtype=torch.float64) / steps, shift)


def stochastic_flow_grid(steps: int, shift: float) -> Tensor:
    """Return 0 and ``steps`` float64 fractions of the path to noise, even from 0.04 to 1, shifted as in training.

    The step to 0 is the one without noise (Ma et al. 2024, SiT, arXiv:2401.08740, appendix B; REPA and SR-DiT).
    """
    noisy = torch.linspace(1.0, _LAST_STEP, _some(steps), dtype=torch.float64)
    return densities.shift(torch.cat([noisy, noisy.new_zeros(1)]).flip(0), shift)


def karras_sigmas(steps: int) -> Tensor:
    """Return ``[steps]`` float64 sigmas from 0.002 to 80, for one step 80 (Karras 2022, eq. 5); ConfigError: none."""
    share = torch.arange(_some(steps), dtype=torch.float64) / max(1, steps - 1)
    most, least = math.pow(SIGMA_MAX, 1 / _RHO), math.pow(SIGMA_MIN, 1 / _RHO)
    return ((most + share * (least - most)) ** _RHO).flip(0)


def _some(steps: int) -> int:
    if steps < 1:
        raise ConfigError(f"{steps} sampling steps; choose 1 or more")
    return steps


def _section(first: int, last: int, count: int) -> list[int]:
    """Return ``count`` evenly spaced levels from ``first`` to ``last``; a single one is ``first``."""
    stride = (last - first) / (count - 1) if count > 1 else 1.0
    # A running sum, as in improved-diffusion: a product would sometimes round differently.
    return [first + round(offset) for offset in accumulate(repeat(stride, count - 1), initial=0.0)] if count else []


def _strided(timesteps: int, count: int) -> list[int]:
    for stride in range(1, timesteps):
        levels = list(range(0, timesteps, stride))
        if len(levels) == count:
            return levels
    raise ConfigError(
        f"--respacing ddim{count}: no integer stride takes {count} of {timesteps} levels; use --respacing {count}, or "
        f"a divisor of {timesteps}"
    )
