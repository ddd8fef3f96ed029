"""The solvers of diffusers, for every process.

The schedule is shortened first: it keeps only the noise levels that the solver visits, and the solver runs over every
level of that short schedule (Nichol & Dhariwal 2021, arXiv:2102.09672, section 4). DDIM, whose stride in diffusers is
always ``T // steps``, is thereby exact for any number of steps.

One form serves every process. The model sees ``alpha * x0 + sigma * noise``; divided by ``sqrt(alpha^2 + sigma^2)``
it is variance preserving with ``abar = alpha^2 / (alpha^2 + sigma^2)``, the form that the solvers expect. Nothing is
lost, because their steps depend on the SNR alone (Karras et al. 2022, arXiv:2206.00364, section 3). The coefficients
of its level convert a prediction to x0 (``Levels.clean_factors``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, ObjectiveConfig, Variance
from fastdiff.config.sections.sampler import SamplerConfig, SchedulerName
from fastdiff.diffusion.levels import ALPHA, SIGMA, Process
from fastdiff.diffusion.processes import build_process
from fastdiff.errors import ConfigError
from fastdiff.sampling.guidance import Predict
from fastdiff.sampling.respacing import flow_shares, karras_sigmas, spaced, trailing

_NO_SIGNAL = 2.0**-24
"""Abar that is negligible in fp32."""


class DiffusersSolver:
    """A solver of diffusers over the levels of one trajectory.

    Args:
        objective: process and prediction of the training.
        sampler: with the shift as a number.
    """

    def __init__(self, objective: ObjectiveConfig, sampler: SamplerConfig) -> None:
        self._name, self._variance = sampler.scheduler, objective.step_variance
        self._trajectory = trajectory = _trajectory(objective, sampler)
        ancestral = sampler.scheduler == "ddpm"
        self._clamped = [bool(sampler.clip) and not (ancestral and own) for own in trajectory.predicts_step]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self._trajectory.time)

    def __call__(
        self, predict: Predict, latents: Tensor, generators: list[torch.Generator], tick: Callable[[], None]
    ) -> Tensor:
        """See ``solvers.Solver``."""
        # A new scheduler for each batch: some keep earlier predictions.
        trajectory = self._trajectory
        scheduler = _diffusers_scheduler(self._name, trajectory.alpha_bar, self._variance)
        time = trajectory.time.to(latents.device)
        channels = latents.shape[1]
        for level in scheduler.timesteps.tolist():
            noisy = latents * float(trajectory.scale[level])
            output = predict(noisy, time[level].expand(len(latents)), float(trajectory.depth[level])).float()
            # In this order, because near pure noise x0 is the small difference of two large numbers.
            p, q, r = (float(factor[level]) for factor in trajectory.clean)
            clean = (p * output[:, :channels] - q * noisy) / r  # [B, C or 2C, H, W] -> [B, C, H, W]
            if self._clamped[level]:
                clean = clean.clamp(-1, 1)
            estimate = _with_variance(scheduler, clean, output[:, channels:])
            step = scheduler.step(estimate, level, latents, generator=generators, return_dict=False)
            latents = cast(Tensor, step[0])
            tick()
        return latents


@dataclass(frozen=True, slots=True)
class _Trajectory:
    """Noise levels of a solver, ascending: ``[steps]`` each, float64 on the CPU except for the times."""

    time: Tensor
    """Time input of the model: int64 or fp32."""
    alpha_bar: Tensor
    """Abar of the variance-preserving form."""
    depth: Tensor
    """Share of the way from data (0) to noise (1), in the units of the process."""
    scale: Tensor
    """Ratio of the model's input to the latents of the variance-preserving form."""
    clean: tuple[Tensor, Tensor, Tensor]
    """Coefficients (p, q, r) with ``x0 = (p * prediction - q * input) / r``."""
    predicts_step: list[bool]
    """Whether the prediction is itself the mean of ddpm's step from this level; x0 is then only a change of form."""


def _trajectory(objective: ObjectiveConfig, sampler: SamplerConfig) -> _Trajectory:
    process = build_process(objective, "cpu")
    native = _visited(objective, process, sampler)
    levels = process.levels(native)
    rows = levels.table[levels.row].double()
    alpha, sigma = rows[:, ALPHA], rows[:, SIGMA]
    total, clean = alpha**2 + sigma**2, levels.clean_factors()
    if (clean[2] == 0).any():
        assert isinstance(objective, DdpmConfig)  # the other processes exclude such levels
        raise ConfigError(
            f"the last level of the {objective.schedule} schedule is pure noise, where a prediction of "
            f"{objective.predicted} does not determine x0; use --objective.prediction v or x0"
        )
    time = levels.time if levels.time.dtype == torch.int64 else levels.time.float()
    gaps = native.diff(prepend=native.new_tensor([-1])).tolist()
    predicts_step = [objective.predicted == "previous_x" and gap == 1 for gap in gaps]
    return _Trajectory(time, alpha**2 / total, levels.depth[levels.row], total.sqrt(), clean, predicts_step)


def _visited(objective: ObjectiveConfig, process: Process, sampler: SamplerConfig) -> Tensor:
    """Return the visited levels, ``[steps]`` in the native time of the process."""
    steps, respacing = sampler.steps, sampler.respacing
    if isinstance(objective, DdpmConfig):
        timesteps = objective.timesteps
        return torch.tensor(trailing(timesteps, steps) if respacing is None else spaced(timesteps, respacing))
    if respacing is not None:
        raise ConfigError(
            f"--respacing {respacing} chooses from the timesteps of ddpm; {objective.process} has continuous time, so "
            "use --steps"
        )
    if isinstance(objective, EdmConfig):
        return karras_sigmas(steps)
    assert not isinstance(sampler.shift, str)
    return process.draw(flow_shares(steps, 1.0 if sampler.shift is None else sampler.shift))


def _diffusers_scheduler(name: SchedulerName, alpha_bar: Tensor, variance: Variance) -> Any:
    """Build the diffusers scheduler ``name`` for x0 over every level of ``alpha_bar`` (``[steps]`` float64)."""
    import diffusers

    before = torch.cat([alpha_bar.new_ones(1), alpha_bar[:-1]])
    options: dict[str, Any] = {
        "num_train_timesteps": len(alpha_bar),
        "trained_betas": (1 - alpha_bar / before).tolist(),
        "prediction_type": "sample",
        "timestep_spacing": "trailing",
        "thresholding": False,
    }
    if name == "dpmsolver++":
        scheduler = diffusers.DPMSolverMultistepScheduler(**options)
        # This solver steps in log SNR, which is infinite at a level without signal. The substitute has more noise than
        # the level before it, however little signal that level has.
        if alpha_bar[-1] == 0:
            alpha_bar = torch.cat([alpha_bar[:-1], (before[-1:] / 4).clamp(max=_NO_SIGNAL)])
    elif name == "ddim":
        scheduler = diffusers.DDIMScheduler(**options, clip_sample=False)
    else:
        scheduler = diffusers.DDPMScheduler(**options, clip_sample=False, variance_type=variance)
    # Diffusers takes the product of 1 - beta in fp32, which loses the first levels of edm and the last of a cosine.
    scheduler.alphas_cumprod = alpha_bar
    scheduler.set_timesteps(len(alpha_bar))
    return scheduler


def _with_variance(scheduler: Any, clean: Tensor, variance: Tensor) -> Tensor:
    """Return the scheduler's input: x0 and, for a sampler with learned variance, the variance channels.

    ``learned_range`` means the same in diffusers and in training (Nichol & Dhariwal 2021, eq. 15).
    ``learned`` is the log variance in training, and the variance itself in diffusers.
    """
    match scheduler.config.get("variance_type"):
        case "learned_range":
            return torch.cat([clean, variance], dim=1)
        case "learned":
            return torch.cat([clean, variance.exp()], dim=1)
        case _:
            return clean
