"""The losses of Ho et al. 2020 and Nichol & Dhariwal 2021 in float64 NumPy, straight from their equations.

Independent of fastdiff: own schedules, every mean and every logarithm of a variance computed as the papers have them.
All of it is analytic in the prediction, so that the imaginary part of f(x + ih) / h is its exact derivative.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def linear_betas(timesteps: int) -> Array:
    return np.linspace(1e-4, 0.02, timesteps) * (1000 / timesteps)


def cosine_betas(timesteps: int) -> Array:
    f = np.cos((np.arange(timesteps + 1) / timesteps + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - f[1:] / f[:-1], 0.999)


def jsd_betas(timesteps: int) -> Array:
    """Ho et al. 2020's code: the signal falls evenly to nothing."""
    return 1 / np.arange(timesteps, 0, -1)


def zero_terminal_betas(timesteps: int) -> Array:
    """``linear_betas`` with zero terminal SNR (Lin et al. 2023, algorithm 1)."""
    root = np.sqrt(np.cumprod(1 - linear_betas(timesteps)))
    abar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    return 1 - abar / np.append(1.0, abar[:-1])


@dataclass
class Reference:
    """One configuration; ``time`` ``[B]``, all other arrays ``[B, C, H, W]``."""

    betas: Array
    prediction: str
    variance: str

    def __post_init__(self) -> None:
        self.abar = np.cumprod(1 - self.betas)
        self.before = np.append(1.0, self.abar[:-1])
        self.posterior = self.betas * (1 - self.before) / (1 - self.abar)
        self.clipped = np.append(self.posterior[1], self.posterior[1:])

    def noisy(self, clean: Array, noise: Array, time: npt.NDArray[np.int64]) -> Array:
        return at(np.sqrt(self.abar), time) * clean + at(np.sqrt(1 - self.abar), time) * noise

    def posterior_mean(self, clean: Array, noisy: Array, time: npt.NDArray[np.int64]) -> Array:
        """Ho et al. eq. 7."""
        of_clean = np.sqrt(self.before) * self.betas / (1 - self.abar)
        of_noisy = np.sqrt(1 - self.betas) * (1 - self.before) / (1 - self.abar)
        return at(of_clean, time) * clean + at(of_noisy, time) * noisy

    def target(self, clean: Array, noise: Array, time: npt.NDArray[np.int64]) -> Array:
        alpha, sigma = at(np.sqrt(self.abar), time), at(np.sqrt(1 - self.abar), time)
        return {
            "epsilon": noise,
            "x0": clean,
            "v": alpha * noise - sigma * clean,
            "previous_x": self.posterior_mean(clean, self.noisy(clean, noise, time), time),
        }[self.prediction]

    def clean_estimate(self, output: Array, noisy: Array, time: npt.NDArray[np.int64]) -> Array:
        alpha, sigma = at(np.sqrt(self.abar), time), at(np.sqrt(1 - self.abar), time)
        if self.prediction == "x0":
            return output
        if self.prediction == "epsilon":
            return (noisy - sigma * output) / alpha
        if self.prediction == "v":
            return alpha * noisy - sigma * output
        of_clean = np.sqrt(self.before) * self.betas / (1 - self.abar)
        of_noisy = np.sqrt(1 - self.betas) * (1 - self.before) / (1 - self.abar)
        return (output - at(of_noisy, time) * noisy) / at(of_clean, time)

    def log_variance(self, given: Array, time: npt.NDArray[np.int64]) -> Array:
        if self.variance == "learned":
            return given
        small, large = np.log(self.clipped), np.log(self.betas)
        if self.variance == "learned_range":
            share = (given + 1) / 2
            return share * at(large, time) + (1 - share) * at(small, time)
        table = small if self.variance == "fixed_small" else np.log(np.append(self.posterior[1], self.betas[1:]))
        return at(table, time)

    def bits(
        self,
        output: Array,
        given: Array,
        clean: Array,
        noise: Array,
        time: npt.NDArray[np.int64],
        clip: bool = False,
    ) -> Array:
        """``[B]`` term of the bound in bits per dimension; ``clip``: x0 estimates to [-1, 1]."""
        noisy = self.noisy(clean, noise, time)
        estimate = self.clean_estimate(output, noisy, time)
        if clip:
            estimate = estimate.clip(-1, 1)
        mean = output if self.prediction == "previous_x" else self.posterior_mean(estimate, noisy, time)
        log_variance = self.log_variance(given, time)
        true_mean, true_log = self.posterior_mean(clean, noisy, time), at(np.log(self.clipped), time)
        divergence = 0.5 * (
            log_variance - true_log - 1 + np.exp(true_log - log_variance)
            + (true_mean - mean) ** 2 * np.exp(-log_variance)
        )  # fmt: skip
        decoded = -bin_log_probability(clean, mean, log_variance)
        return np.where(at(np.arange(len(self.betas)) == 0, time), decoded, divergence).mean(axis=(1, 2, 3)) / np.log(2)

    def prior_bits(self, clean: Array) -> Array:
        """``[B]`` KL(q(x_T | x0) || N(0, 1)) in bits per dimension."""
        abar = self.abar[-1]
        return (0.5 * (-1 - np.log(1 - abar) + (1 - abar) + abar * clean**2)).mean(axis=(1, 2, 3)) / np.log(2)


def bin_log_probability(value: Array, mean: Array, log_variance: Array) -> Array:
    """Ho et al. eq. 13 with the tanh approximation of the cdf that Nichol & Dhariwal use, and their floor of 1e-12."""
    deviation = np.exp(0.5 * log_variance)
    upper, lower = ((value - mean + side / 255) / deviation for side in (1, -1))
    # In the lower tail two values of the cdf differ without cancellation, and it is the mirror image of the upper one.
    mirrored = (upper + lower).real > 0
    inside = np.where(mirrored, _cdf(-lower) - _cdf(-upper), _cdf(upper) - _cdf(lower))
    probability = np.where(value < -0.999, _cdf(upper), np.where(value > 0.999, _cdf(-lower), inside))
    return np.log(np.where(probability.real < 1e-12, 1e-12, probability))


def at(table: npt.NDArray[np.generic], time: npt.NDArray[np.int64]) -> Array:
    return np.asarray(table[time].reshape(-1, 1, 1, 1))


def _cdf(x: Array) -> Array:
    """``(1 + tanh(u)) / 2`` as ``1 / (1 + exp(-2 u))``; beyond 12 standard deviations it is below the floor."""
    x = np.where(abs(x.real) > 12, 12 * np.sign(x.real), x)
    return 1 / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
