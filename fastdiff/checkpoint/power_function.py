"""Profiles of power-function EMA over time, in float64 (Karras et al. 2024, arXiv:2312.02696).

At time t, the average of exponent gamma weighs the weights of time tau <= t by ``(gamma + 1) tau^gamma / t^(gamma +
1)`` (section 3.1): its memory grows with the training. Its relative ``std`` is the standard deviation of this profile
relative to t. An average is linear in its profile. If a sum of saved profiles approximates a wanted profile, the same
sum of saved averages approximates the wanted average; this works after the training, for any std.
"""

import math

import numpy as np
import numpy.typing as npt

from fastdiff.config.sections.ema import WIDEST
from fastdiff.errors import ConfigError

Floats = npt.NDArray[np.float64]


def exponent(std: float) -> float:
    """Return the gamma >= 0 of a profile of this std; ConfigError: no such std.

    It is the root of ``std^2 (gamma + 2)^2 (gamma + 3) = gamma + 1``. At gamma = 0 the average is the plain mean, of
    std 12^(-1/2); it falls as gamma grows.
    """
    if not 0.0 < std <= WIDEST:
        raise ConfigError(f"a power-function average of std {std}: above 0 and at most {WIDEST:.4f}, the plain mean")
    t = std**-2.0
    return max(0.0, float(np.roots([1.0, 7.0, 16.0 - t, 12.0 - t]).real.max()))


def share(gamma: float, t: int) -> float:
    """Return ``1 - (1 - 1/t)^(gamma + 1)``, the share of the average that step t replaces, counted from 1.

    It is 1 in the first step, so the initial value of the average does not matter.
    """
    return 1.0 if t <= 1 else -math.expm1((gamma + 1.0) * math.log1p(-1.0 / t))


def product(
    gamma: Floats | float, end: Floats | float, other_gamma: Floats | float, other_end: Floats | float
) -> Floats:
    """Return the inner product of two profiles: the integral of their product over time; arguments broadcast.

    It is ``(g + 1)(h + 1) / (g + h + 1) * m^(g + h + 1) / (s^(g + 1) t^(h + 1))`` with m = min(s, t), computed from
    powers of ratios that are at most 1.
    """
    first = np.minimum(end, other_end)
    ratios = (first / end) ** gamma * (first / other_end) ** other_gamma * first / (np.multiply(end, other_end))
    return np.asarray((gamma + 1.0) * (other_gamma + 1.0) / (gamma + other_gamma + 1.0) * ratios, np.float64)


def fit(gammas: Floats, ends: Floats, gamma: float, end: float) -> tuple[Floats, float]:
    """Fit a combination of profiles to a wanted profile by least squares.

    It is the fit of the paper's appendix C.2 with one more condition: the coefficients sum to 1, as every profile
    does. So weights that are constant during the training are reproduced exactly.

    Args:
        gammas: ``[K]`` exponents of the saved profiles.
        ends: ``[K]`` times of their averages.
        gamma: exponent of the wanted profile.
        end: its time.

    Returns:
        ``[K]`` coefficients, and the norm of the residual relative to that of the wanted profile.
    """
    size = float(product(gamma, end, gamma, end))
    gram = product(gammas[:, None], ends[:, None], gammas[None], ends[None]) / size
    wanted = product(gammas, ends, gamma, end) / size
    count = len(gammas)
    system = np.ones((count + 1, count + 1))
    system[:count, :count], system[count, count] = gram, 0.0
    # lstsq, because the system is singular if two snapshots have no applied step between them.
    found = np.linalg.lstsq(system, np.append(wanted, 1.0), rcond=None)[0][:count]
    missed = 1.0 - 2.0 * found @ wanted + found @ gram @ found
    return found, math.sqrt(max(0.0, float(missed)))


_POWER = "power-"


def constant_name(rate: float) -> str:
    """Return the name of the average of a constant decay rate: "0.9999"."""
    return str(rate)


def power_name(std: float) -> str:
    """Return the name of the power-function average of a relative std: "power-0.05"."""
    return f"{_POWER}{std}"


def in_words(average: str) -> str:
    """Return the readable form of an average's name: "EMA of rate 0.9999" or "EMA of width 0.05"."""
    std = average.removeprefix(_POWER)
    return f"EMA of rate {average}" if std == average else f"EMA of width {std}"
