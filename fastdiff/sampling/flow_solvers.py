"""Solvers of flow in its own time: the velocity, or the velocity and noise, is integrated from t = 1 to the data.

With ``x(t) = alpha(t) x0 + sigma(t) noise``, the probability flow is ``dx/dt = velocity``, which follows from the
prediction by the coefficients of its level. The reverse SDE with the diffusion ``2 sigma`` (Ma et al. 2024, SiT,
arXiv:2401.08740, section 2.4) is ``dx = (velocity + noise estimate) dt + sqrt(2 sigma) dw``, because the score is the
negative estimate of the noise over sigma.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.config.sections.objective import FlowConfig, ObjectiveConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.diffusion.flow import Flow, interpolant
from fastdiff.errors import ConfigError
from fastdiff.sampling.guidance import Predict
from fastdiff.sampling.respacing import flow_grid, stochastic_flow_grid

Generators = list[torch.Generator]


@dataclass(frozen=True, slots=True)
class _Levels:
    """Visited levels of a flow, from noise to data: ``[steps + 1]`` float64 each, on the CPU. The last is not asked."""

    t: Tensor
    time: Tensor
    """Time input of the model, fp32."""
    sigma: Tensor
    clean: tuple[Tensor, Tensor, Tensor]
    """Coefficients (p, q, r) with ``x0 = (p * prediction - q * input) / r``."""
    velocity: tuple[Tensor, Tensor]
    """Coefficients (p, q) with ``dx/dt = p * prediction + q * input``."""
    velocity_of_clean: tuple[Tensor, Tensor]
    """The same for x0 in place of the prediction."""
    noise: tuple[Tensor, Tensor]
    """Coefficients (p, q) with ``noise = p * velocity + q * input``."""


class Field:
    """The velocity that a network predicts, at the levels of a trajectory; level 0 is pure noise."""

    def __init__(self, predict: Predict, levels: _Levels, clip: bool) -> None:
        self._predict, self._levels, self._clip = predict, levels, clip

    def velocity(self, x: Tensor, level: int) -> Tensor:
        """Return dx/dt ``[B, C, H, W]`` at ``x``, of the same shape."""
        levels, channels = self._levels, x.shape[1]
        time = levels.time[level].to(x.device).expand(len(x))
        output = self._predict(x, time, float(levels.t[level])).float()[:, :channels]
        if not self._clip:
            return _combined(levels.velocity, level, output, x)
        p, q, r = (float(factor[level]) for factor in levels.clean)
        return _combined(levels.velocity_of_clean, level, ((p * output - q * x) / r).clamp(-1, 1), x)

    def noise(self, velocity: Tensor, x: Tensor, level: int) -> Tensor:
        """Return the estimate of the noise in ``x [B, C, H, W]`` that its velocity implies."""
        return _combined(self._levels.noise, level, velocity, x)

    def step(self, level: int) -> float:
        """Return the signed length of the step from a level to the next one."""
        return float(self._levels.t[level + 1] - self._levels.t[level])

    def sigma(self, level: int) -> float:
        """Return the standard deviation of the noise at a level."""
        return float(self._levels.sigma[level])


def _combined(factors: tuple[Tensor, Tensor], level: int, of: Tensor, x: Tensor) -> Tensor:
    p, q = (float(factor[level]) for factor in factors)
    return p * of + q * x if q else p * of


Step = Callable[[Field, Tensor, int, bool, Generators], Tensor]
"""Takes ``x`` from a level to the next one; the last step is told, and the random numbers of each image are given."""


def euler(field: Field, x: Tensor, level: int, last: bool, generators: Generators) -> Tensor:
    """Take a step of first order."""
    return x + field.step(level) * field.velocity(x, level)


def heun(field: Field, x: Tensor, level: int, last: bool, generators: Generators) -> Tensor:
    """Take a step of second order (Karras et al. 2022, arXiv:2206.00364, algorithm 1); the last one is of the first."""
    dt, here = field.step(level), field.velocity(x, level)
    ahead = x + dt * here
    return ahead if last else x + dt / 2 * (here + field.velocity(ahead, level + 1))


def euler_maruyama(field: Field, x: Tensor, level: int, last: bool, generators: Generators) -> Tensor:
    """Take a step of the reverse SDE; the last one goes to the mean (Ma et al. 2024, SiT)."""
    dt, velocity = field.step(level), field.velocity(x, level)
    mean = x + dt * (velocity + field.noise(velocity, x, level))
    if last:
        return mean
    return mean + math.sqrt(2.0 * field.sigma(level) * -dt) * normal(generators, x.shape[1:], x.device)


def normal(generators: Generators, shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
    """Return standard normal numbers ``[B, *shape]``, each image's from its own generator."""
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators]).to(device)


class FlowSolver:
    """A step of flow over the levels of one trajectory.

    Args:
        grid: returns ``[steps + 1]`` shares of the way from data to noise, ascending, by number of steps and shift.
        step: see ``Step``.
        objective: process and prediction of the training.
        sampler: with the shift as a number.

    Raises:
        ConfigError: another process than flow, or no steps.
    """

    def __init__(
        self, grid: Callable[[int, float], Tensor], step: Step, objective: ObjectiveConfig, sampler: SamplerConfig
    ) -> None:
        if not isinstance(objective, FlowConfig):
            raise ConfigError(
                f"--scheduler {sampler.scheduler} integrates the velocity of flow, and the model was trained with "
                f"{objective.process}; use ddim, dpmsolver++ or ddpm"
            )
        if sampler.respacing is not None:
            raise ConfigError(
                f"--respacing {sampler.respacing} chooses from the timesteps of ddpm; flow has continuous time, so use "
                "--steps"
            )
        assert not isinstance(sampler.shift, str)
        self._levels = _levels(objective, grid(sampler.steps, 1.0 if sampler.shift is None else sampler.shift))
        self._step, self._clip = step, bool(sampler.clip)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self._levels.t) - 1

    def __call__(self, predict: Predict, latents: Tensor, generators: Generators, tick: Callable[[], None]) -> Tensor:
        """See ``solvers.Solver``."""
        field = Field(predict, self._levels, self._clip)
        for level in range(self.steps):
            latents = self._step(field, latents, level, level == self.steps - 1, generators)
            tick()
        return latents


def euler_solver(objective: ObjectiveConfig, sampler: SamplerConfig) -> FlowSolver:
    """Return the solver ``euler``."""
    return FlowSolver(flow_grid, euler, objective, sampler)


def heun_solver(objective: ObjectiveConfig, sampler: SamplerConfig) -> FlowSolver:
    """Return the solver ``heun``."""
    return FlowSolver(flow_grid, heun, objective, sampler)


def euler_maruyama_solver(objective: ObjectiveConfig, sampler: SamplerConfig) -> FlowSolver:
    """Return the solver ``euler-maruyama``."""
    return FlowSolver(stochastic_flow_grid, euler_maruyama, objective, sampler)


def _levels(objective: FlowConfig, ascending: Tensor) -> _Levels:
    """Return the levels of ``[steps + 1]`` float64 shares of the way from data to noise."""
    process = Flow(objective)
    t = process.draw(ascending).flip(0)
    found = process.levels(t)
    p, q, r = clean = found.clean_factors()
    alpha, sigma, alpha_slope, sigma_slope = interpolant(objective.path, t)
    # Of dx/dt = alpha' x0 + sigma' noise and x = alpha x0 + sigma noise.
    turn = sigma * alpha_slope - alpha * sigma_slope
    return _Levels(
        t=t,
        time=found.time.float(),
        sigma=sigma,
        clean=clean,
        velocity=(turn * p / (r * sigma), (sigma_slope - turn * q / r) / sigma),
        velocity_of_clean=(turn / sigma, sigma_slope / sigma),
        noise=(-alpha / turn, alpha_slope / turn),
    )
