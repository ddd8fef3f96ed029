"""Sampling from a trained model with the solvers of diffusers.

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

import numpy as np
import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, ObjectiveConfig, Variance
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.diffusion.levels import ALPHA, SIGMA, Process
from fastdiff.diffusion.processes import build_process
from fastdiff.errors import ConfigError
from fastdiff.progress_bar import Bar
from fastdiff.sampling.respacing import flow_shares, karras_sigmas, spaced, trailing

_NO_SIGNAL = 2.0**-24
"""Abar that is negligible in fp32."""
_LABELS = (1,)
"""Spawn key that makes the random labels independent of the noise."""

Denoiser = Callable[..., Tensor]
"""Model, called with noisy latents ``[B, C, H, W]`` fp32, times ``[B]`` (int64 timesteps or fp32 times) and the
condition's tensors by name; returns ``[B, C or 2C, H, W]``: C channels of prediction, then C of a learned variance."""


def grid_classes(model: ModelConfig, trained: int | None, most: int = 10) -> Tensor:
    """Return the classes of a grid's columns: the first ones of the data, or the null class for data without classes.

    Args:
        model: Configuration of the network; its number of classes is the null class.
        trained: Number of classes in the data; None: data without classes.
        most: Largest number of columns.

    Returns:
        ``[columns]`` int64.
    """
    null = model.classes
    return torch.arange(min(most, trained)) if trained else torch.full((most,), null)


@torch.no_grad()
def sample(
    model: Denoiser,
    objective: ObjectiveConfig,
    condition: Condition,
    sampler: SamplerConfig,
    *,
    shape: tuple[int, int, int],
    null: Condition,
    batch: int = 256,
    first_index: int = 0,
    progress: bool = False,
) -> Tensor:
    """Draw one image per entry of the condition.

    Image i is a function of the model, its condition, ``sampler`` and ``first_index + i`` alone. It does not depend on
    ``batch`` or on the distribution of the images over ranks, up to the rounding of matrix products.

    Args:
        model: On the device of the condition.
        objective: Process and prediction of the training, with ``auto`` resolved.
        condition: Inputs of the model besides noisy latents and time, ``[N, ...]`` each; at least one.
        sampler: Solver, levels, guidance and seed; used as they are.
        shape: ``(C, H, W)`` of an image's latents.
        null: One unconditional sample of each input that guidance replaces, as in ``Objective``.
        batch: Images per forward pass (guidance doubles them inside).
        first_index: Number of the first image within a larger set, 0 or above.
        progress: Show a progress bar on standard error.

    Returns:
        ``[N, C, H, W]`` fp32 latents on the device of the condition, not clipped.

    Raises:
        ConfigError: Invalid steps or channels, or epsilon prediction from pure noise.
    """
    _check_channels(sampler.cfg_channels, shape[0])
    trajectory = _trajectory(objective, sampler)
    guidance = 1.0 if sampler.cfg is None else sampler.cfg, sampler.cfg_channels or shape[0]
    ancestral = sampler.scheduler == "ddpm"
    clamped = [bool(sampler.clip) and not (ancestral and own) for own in trajectory.predicts_step]
    count, device = next((len(value), value.device) for value in condition.values())
    parts = [torch.empty(0, *shape, device=device)]
    with Bar("sampling", -(-count // batch) * len(trajectory.time), "steps", shown=progress) as bar:
        for start in range(0, count, batch):
            chosen = {name: value[start : start + batch] for name, value in condition.items()}
            index = range(first_index + start, first_index + min(start + batch, count))
            generators = [_generator(sampler.seed, i) for i in index]
            predict = _guided(model, chosen, null, *guidance)
            # A new solver for each batch: some keep earlier predictions.
            solver = _diffusers_scheduler(sampler.scheduler, trajectory.alpha_bar, objective.step_variance)
            latents = torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)
            parts.append(_solve(predict, solver, trajectory, latents, generators, bar, clamped))
    return torch.cat(parts)


def uniform_labels(seed: int, index: range, classes: int) -> Tensor:
    """Draw a class for each image of a set, uniformly.

    Label i is a function of ``(seed, i)`` alone, and independent of the noise of image i.

    Args:
        seed: The seed of ``sample``.
        index: Numbers of the N images.
        classes: Number of classes; labels are from 0 to ``classes - 1``.

    Returns:
        ``[N]`` int64.
    """
    drawn = (int(_sequence(seed, i, spawn_key=_LABELS).generate_state(1, np.uint64)[0]) for i in index)
    return torch.tensor([number * classes >> 64 for number in drawn], dtype=torch.int64)


def _check_channels(cfg_channels: int | None, channels: int) -> None:
    if cfg_channels is not None and not 1 <= cfg_channels <= channels:
        raise ConfigError(
            f"guidance on {cfg_channels} channels: choose 1 to {channels}, the channels that the model predicts"
        )


@dataclass(frozen=True, slots=True)
class _Trajectory:
    """Noise levels of a solver, ascending: ``[steps]`` each, float64 on the CPU except for the times."""

    time: Tensor
    """Time input of the model: int64 or fp32."""
    alpha_bar: Tensor
    """Abar of the variance-preserving form."""
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
    return _Trajectory(time, alpha**2 / total, total.sqrt(), clean, predicts_step)


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
    return process.draw(flow_shares(steps, 1.0 if sampler.shift is None else sampler.shift))


def _diffusers_scheduler(name: str, alpha_bar: Tensor, variance: Variance) -> Any:
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


def _solve(
    predict: Callable[[Tensor, Tensor], Tensor],
    scheduler: Any,
    trajectory: _Trajectory,
    latents: Tensor,
    generators: list[torch.Generator],
    bar: Any,
    clamped: list[bool],
) -> Tensor:
    """Take all steps from ``latents [B, C, H, W]`` of pure noise; ``clamped [steps]``: whether to clamp x0."""
    time = trajectory.time.to(latents.device)
    channels = latents.shape[1]
    for level in scheduler.timesteps.tolist():
        noisy = latents * float(trajectory.scale[level])
        output = predict(noisy, time[level].expand(len(latents))).float()
        # In this order, because near pure noise x0 is the small difference of two large numbers.
        p, q, r = (float(factor[level]) for factor in trajectory.clean)
        clean = (p * output[:, :channels] - q * noisy) / r  # [B, C or 2C, H, W] -> [B, C, H, W]
        if clamped[level]:
            clean = clean.clamp(-1, 1)
        estimate = _with_variance(scheduler, clean, output[:, channels:])
        step = scheduler.step(estimate, level, latents, generator=generators, return_dict=False)
        latents = cast(Tensor, step[0])
        bar.update()
    return latents


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


def _guided(
    model: Denoiser, condition: Condition, null: Condition, scale: float, guided_channels: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return ``model`` under classifier-free guidance; a learned variance stays that of the conditional prediction.

    DiT does the same (Peebles & Xie 2023, ``forward_with_cfg``): an extrapolated variance could leave its range.
    """
    if scale == 1.0:
        return lambda noisy, time: model(noisy, time, **condition)
    without = {
        name: null[name].to(value).expand_as(value) if name in null else value for name, value in condition.items()
    }
    both = {name: torch.cat([value, without[name]]) for name, value in condition.items()}

    def predict(noisy: Tensor, time: Tensor) -> Tensor:
        joined = model(torch.cat([noisy, noisy]), torch.cat([time, time]), **both)
        conditional, unconditional = joined.float().chunk(2)  # [2B, C or 2C, H, W] -> 2 x [B, C or 2C, H, W]
        others, unconditional = conditional[:, guided_channels:], unconditional[:, :guided_channels]
        guided = unconditional + scale * (conditional[:, :guided_channels] - unconditional)
        return torch.cat([guided, others], dim=1)

    return predict


def _generator(seed: int, index: int) -> torch.Generator:
    """Return the random numbers of image ``index``: initial noise and, for ddpm, the noise of each step."""
    return torch.Generator().manual_seed(int(_sequence(seed, index).generate_state(1, np.uint64)[0]))


def _sequence(seed: int, index: int, spawn_key: tuple[int, ...] = ()) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed & (2**64 - 1), index], spawn_key=spawn_key)
