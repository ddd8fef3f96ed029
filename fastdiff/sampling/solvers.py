"""Images from a trained model, with the solvers of diffusers.

The schedule is shortened first: of the noise levels of the training only those that the solver visits are kept, and
the solver runs over every level of that short schedule (Nichol & Dhariwal 2021, arXiv:2102.09672, section 4). DDIM,
which in diffusers always goes back by ``T // steps``, is thereby exact for any number of steps.

One form serves every process. The model sees ``alpha * x0 + sigma * noise``; divided by ``sqrt(alpha^2 + sigma^2)``
that is variance preserving, with ``abar = alpha^2 / (alpha^2 + sigma^2)``, which is what the solvers know. Their steps
depend on the SNR alone (Karras et al. 2022, arXiv:2206.00364, section 3), so that nothing is lost by it. What the
model predicts is turned into x0 by the row of its level (``fastdiff.diffusion.levels``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.objective import DdpmConfig, EdmConfig, ObjectiveConfig, Variance
from fastdiff.config.sampler import SamplerConfig
from fastdiff.diffusion.levels import ALPHA, SIGMA, TARGET_NOISE, Process, turn
from fastdiff.diffusion.processes import build_process
from fastdiff.errors import ConfigError
from fastdiff.sampling.respacing import flow_shares, karras_sigmas, spaced, trailing

_NO_SIGNAL = 2.0**-24
"""Abar that is as good as 0 in fp32."""
_LABELS = (1,)
"""What keeps the numbers of the labels apart from those of the images."""

Denoiser = Callable[..., Tensor]
"""Called with noisy latents ``[B, C, H, W]`` fp32, times ``[B]`` (int64 timesteps or fp32 times) and the condition's
tensors by name; returns ``[B, C or 2C, H, W]``, of which the first C predict and the others are for the variance."""


def grid_classes(model: ModelConfig, trained: int | None, most: int = 10) -> Tensor:
    """Classes for the columns of a grid: the first ones of the data, or the null class if the data had none.

    Args:
        model: Knows the null class.
        trained: Number of classes in the data, None for data without classes.
        most: Number of columns at the most.

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
    """Draws one image per entry of the condition.

    Image i is a function of the model, its condition, ``sampler`` and ``first_index + i`` alone. It does not depend on
    ``batch`` or on how the images are shared between ranks, up to the rounding of matrix products.

    Args:
        model: On the device of the condition.
        objective: Noise and meaning of the prediction, as in the training, with what was ``auto`` resolved.
        condition: Inputs of the model besides noisy latents and time, ``[N, ...]`` each; at least one.
        sampler: Solver, levels, guidance and seed; nothing of it is decided here.
        shape: ``(C, H, W)`` of an image's latents.
        null: The condition of nothing, one sample of each input that guidance replaces, as ``Objective`` has it.
        batch: Images per forward pass (guidance doubles them inside).
        first_index: Number of the first image, 0 or above, where the images are part of a larger set.
        progress: Show a progress bar on standard error.

    Returns:
        ``[N, C, H, W]`` fp32 latents on the device of the condition, not clipped.

    Raises:
        ConfigError: Impossible steps or channels, or epsilon prediction from pure noise.
    """
    _check_channels(sampler.cfg_channels, shape[0])
    trajectory = _trajectory(objective, sampler)
    guidance = 1.0 if sampler.cfg is None else sampler.cfg, sampler.cfg_channels or shape[0]
    ancestral = sampler.scheduler == "ddpm"
    clamped = [bool(sampler.clip) and not (ancestral and own) for own in trajectory.predicts_step]
    count, device = next((len(value), value.device) for value in condition.values())
    parts = [torch.empty(0, *shape, device=device)]
    with _bar(progress, -(-count // batch) * len(trajectory.time)) as bar:
        for start in range(0, count, batch):
            chosen = {name: value[start : start + batch] for name, value in condition.items()}
            index = range(first_index + start, first_index + min(start + batch, count))
            generators = [_generator(sampler.seed, i) for i in index]
            predict = _guided(model, chosen, null, *guidance)
            # A new one for each batch: some keep the last predictions.
            solver = _diffusers_scheduler(sampler.scheduler, trajectory.alpha_bar, objective.step_variance)
            latents = torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)
            parts.append(_solve(predict, solver, trajectory, latents, generators, bar, clamped))
    return torch.cat(parts)


def uniform_labels(seed: int, index: range, classes: int) -> Tensor:
    """Draws a class for each image of a set, every one as probable as the others.

    Label i is a function of ``(seed, i)`` alone, and independent of the noise of image i.

    Args:
        seed: That of ``sample``.
        index: Numbers of the images, N of them.
        classes: Labels are from 0 to below this.

    Returns:
        ``[N]`` int64.
    """
    drawn = (int(_sequence(seed, i, spawn_key=_LABELS).generate_state(1, np.uint64)[0]) for i in index)
    return torch.tensor([number * classes >> 64 for number in drawn], dtype=torch.int64)


def _check_channels(cfg_channels: int | None, channels: int) -> None:
    if cfg_channels is not None and not 1 <= cfg_channels <= channels:
        raise ConfigError(
            f"guidance on {cfg_channels} channels: the model predicts {channels}, so from 1 to {channels}"
        )


@dataclass(frozen=True, slots=True)
class _Trajectory:
    """The noise levels of a solver, ascending; numbers but the times are float64 on the CPU, ``[steps]`` each."""

    time: Tensor
    """What the model is told: int64 or fp32."""
    alpha_bar: Tensor
    """Of the variance-preserving form."""
    scale: Tensor
    """The model's input over the latents of that form."""
    clean: tuple[Tensor, Tensor, Tensor]
    """(p, q, r), by which x0 is ``(p * prediction - q * input) / r``."""
    predicts_step: list[bool]
    """Whether the prediction is the mean of ddpm's step from here, of which x0 is no more than another form."""


def _trajectory(objective: ObjectiveConfig, sampler: SamplerConfig) -> _Trajectory:
    process = build_process(objective, "cpu")
    native = _visited(objective, process, sampler)
    levels = process.levels(native)
    rows = levels.table[levels.row].double()
    alpha, sigma = rows[:, ALPHA], rows[:, SIGMA]
    total, per_x0 = alpha**2 + sigma**2, turn(rows)
    if (per_x0 == 0).any():
        assert isinstance(objective, DdpmConfig)  # the others leave out such ends
        raise ConfigError(
            f"the last level of the {objective.schedule} schedule is pure noise, from which a prediction of "
            f"{objective.predicted} gives no image; use --objective.prediction v or x0"
        )
    time = levels.time if levels.time.dtype == torch.int64 else levels.time.float()
    gaps = native.diff(prepend=native.new_tensor([-1])).tolist()
    predicts_step = [objective.predicted == "previous_x" and gap == 1 for gap in gaps]
    clean = sigma, rows[:, TARGET_NOISE], per_x0
    return _Trajectory(time, alpha**2 / total, total.sqrt(), clean, predicts_step)


def _visited(objective: ObjectiveConfig, process: Process, sampler: SamplerConfig) -> Tensor:
    """Native levels of the process, ``[steps]``."""
    steps, respacing = sampler.steps, sampler.respacing
    if isinstance(objective, DdpmConfig):
        timesteps = objective.timesteps
        return torch.tensor(trailing(timesteps, steps) if respacing is None else spaced(timesteps, respacing))
    if respacing is not None:
        raise ConfigError(
            f"--respacing {respacing} chooses from the timesteps of ddpm; the time of {objective.process} has none, so "
            "use --steps"
        )
    if isinstance(objective, EdmConfig):
        return karras_sigmas(steps)
    return process.draw(flow_shares(steps, 1.0 if sampler.shift is None else sampler.shift))


def _diffusers_scheduler(name: str, alpha_bar: Tensor, variance: Variance) -> Any:
    """The diffusers class called ``name`` over every level of ``alpha_bar`` (``[steps]`` float64), for x0."""
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
        # A level without any signal is infinitely far away for this solver, which counts in log SNR. What stands for it
        # has more noise than the level before, however little signal that has.
        if alpha_bar[-1] == 0:
            alpha_bar = torch.cat([alpha_bar[:-1], (before[-1:] / 4).clamp(max=_NO_SIGNAL)])
    elif name == "ddim":
        scheduler = diffusers.DDIMScheduler(**options, clip_sample=False)
    else:
        scheduler = diffusers.DDPMScheduler(**options, clip_sample=False, variance_type=variance)
    # Diffusers multiplies 1 - beta up in fp32, which loses the first levels of edm and the last of a cosine schedule.
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
    """Take all steps from ``latents [B, C, H, W]`` of pure noise; ``clamped [steps]``: whether x0 is."""
    time = trajectory.time.to(latents.device)
    channels = latents.shape[1]
    for level in scheduler.timesteps.tolist():
        noisy = latents * float(trajectory.scale[level])
        output = predict(noisy, time[level].expand(len(latents))).float()
        # In this order: near pure noise x0 is the small difference of two large numbers.
        p, q, r = (float(factor[level]) for factor in trajectory.clean)
        clean = (p * output[:, :channels] - q * noisy) / r
        if clamped[level]:
            clean = clean.clamp(-1, 1)
        estimate = _with_variance(scheduler, clean, output[:, channels:])
        step = scheduler.step(estimate, level, latents, generator=generators, return_dict=False)
        latents = cast(Tensor, step[0])
        bar.update()
    return latents


def _with_variance(scheduler: Any, clean: Tensor, variance: Tensor) -> Tensor:
    """What the scheduler is given: x0 and, where it draws with a learned variance, the channels of that, too.

    ``learned_range`` means there what it means in training (Nichol & Dhariwal 2021, eq. 15), over the short schedule.
    ``learned`` is the logarithm of the variance in training, and the variance itself there.
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
    """The prediction of ``model`` under classifier-free guidance; the variance, if there is one, is the conditional's.

    So does DiT (Peebles & Xie 2023, ``forward_with_cfg``): extrapolated, it could leave the range that was learned.
    """
    if scale == 1.0:
        return lambda noisy, time: model(noisy, time, **condition)
    without = {
        name: null[name].to(value).expand_as(value) if name in null else value for name, value in condition.items()
    }
    both = {name: torch.cat([value, without[name]]) for name, value in condition.items()}

    def predict(noisy: Tensor, time: Tensor) -> Tensor:
        joined = model(torch.cat([noisy, noisy]), torch.cat([time, time]), **both)
        conditional, unconditional = joined.float().chunk(2)
        others, unconditional = conditional[:, guided_channels:], unconditional[:, :guided_channels]
        guided = unconditional + scale * (conditional[:, :guided_channels] - unconditional)
        return torch.cat([guided, others], dim=1)

    return predict


def _generator(seed: int, index: int) -> torch.Generator:
    """The random numbers of image ``index``: initial noise and, for ddpm, the noise of each step."""
    return torch.Generator().manual_seed(int(_sequence(seed, index).generate_state(1, np.uint64)[0]))


def _sequence(seed: int, index: int, spawn_key: tuple[int, ...] = ()) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed & (2**64 - 1), index], spawn_key=spawn_key)


def _bar(show: bool, total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=not show, desc="sampling", unit="step", leave=False)
