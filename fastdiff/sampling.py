"""Images from a trained model, with the solvers of diffusers.

The schedule is shortened first: of the T noise levels of the training only those that the solver visits are
kept, and the solver runs over every level of that short schedule (Nichol & Dhariwal 2021, arXiv:2102.09672,
section 4). DDIM, which in diffusers always goes back by ``T // steps``, is thereby exact for any number of
steps. The levels are the "trailing" ones of Lin et al. 2023 (arXiv:2305.08891, table 2), which start at the
noisiest one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config import PREDICTION_TYPES, DiffusionConfig
from fastdiff.errors import ConfigError
from fastdiff.model_config import DiTConfig
from fastdiff.schedule import betas

SchedulerName = Literal["ddim", "dpmsolver++", "ddpm"]

_SMALLEST_ALPHA_BAR = 2.0**-24


Denoiser = Callable[..., Tensor]
"""Called with noisy latents ``[B, C, H, W]`` fp32, times ``[B]`` int64 and the condition's tensors by name; returns
``[B, C or more, H, W]``, of which the first C predict."""


def grid_classes(model: DiTConfig, trained: int | None, most: int = 10) -> Tensor:
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
    objective: DiffusionConfig,
    condition: Condition,
    *,
    shape: tuple[int, int, int],
    null: Condition,
    scheduler: SchedulerName = "ddim",
    steps: int = 25,
    cfg: float | None = None,
    seed: int = 0,
    batch: int = 256,
    first_index: int = 0,
    progress: bool = False,
) -> Tensor:
    """Draws one image per entry of the condition.

    Image i is a function of the model, its condition and ``(seed, first_index + i)`` alone. It does not depend on
    ``batch`` or on how the images are shared between ranks, up to the rounding of matrix products.

    Args:
        model: On the device of the condition.
        objective: Noise schedule and meaning of the prediction, as in the training.
        condition: Inputs of the model besides noisy latents and time, ``[N, ...]`` each; at least one.
        shape: ``(C, H, W)`` of an image's latents.
        null: The condition of nothing, one sample of each input that guidance replaces, as ``Objective`` has it.
        scheduler: ddim (Song et al. 2021, arXiv:2010.02502, eta 0), dpmsolver++ (Lu et al. 2022,
            arXiv:2211.01095, second order) or ddpm (Ho et al. 2020, arXiv:2006.11239, posterior variance).
        steps: Noise levels visited, 1 to ``objective.timesteps``.
        cfg: Scale of classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598) in the form
            ``without + cfg * (with - without)``; None or 1: none, at half the cost.
        seed: Any integer; its low 64 bits count.
        batch: Images per forward pass (guidance doubles them inside).
        first_index: Number of the first image, 0 or above, where the images are part of a larger set.
        progress: Show a progress bar on standard error.

    Returns:
        ``[N, C, H, W]`` fp32 latents on the device of the condition, not clipped.

    Raises:
        ConfigError: Unknown scheduler, too many steps, or epsilon prediction from zero terminal SNR.
    """
    solver_of = _solver_factory(objective, scheduler, steps)
    scale = 1.0 if cfg is None else cfg
    count, device = next((len(value), value.device) for value in condition.values())
    parts = [torch.empty(0, *shape, device=device)]
    with _bar(progress, -(-count // batch) * steps) as bar:
        for start in range(0, count, batch):
            chosen = {name: value[start : start + batch] for name, value in condition.items()}
            index = range(first_index + start, first_index + min(start + batch, count))
            generators = [_generator(seed, i) for i in index]
            predict = _guided(model, chosen, null, scale)
            parts.append(_solve(predict, solver_of(), shape, generators, device, bar))
    return torch.cat(parts)


def visited_timesteps(timesteps: int, steps: int) -> list[int]:
    """The noise levels of ``timesteps`` that a solver visits, ascending; the last is ``timesteps - 1``.

    Raises:
        ConfigError: ``steps`` is not in 1 to ``timesteps``.
    """
    if not 1 <= steps <= timesteps:
        raise ConfigError(f"{steps} sampling steps; choose 1 to {timesteps}, the levels of the training")
    return [-(-timesteps * k // steps) - 1 for k in range(1, steps + 1)]


class _Solver:
    """A diffusers scheduler over a short schedule; ``times[i]`` is the training timestep of its level i."""

    def __init__(self, scheduler: Any, times: list[int]) -> None:
        self.scheduler = scheduler
        self.times = times


def _solver_factory(objective: DiffusionConfig, name: str, steps: int) -> Callable[[], _Solver]:
    """Makes solvers, one for each batch because some keep the last predictions."""
    if name not in get_args(SchedulerName):
        choices = ", ".join(get_args(SchedulerName))
        raise ConfigError(f"scheduler {name!r} is unknown; choose one of {choices}")
    if objective.zero_terminal_snr and objective.predicted == "epsilon":
        raise ConfigError(
            "the last level of a zero-terminal-SNR schedule is pure noise, from which an epsilon prediction "
            "gives no image; use --objective.prediction v or x0"
        )
    times = visited_timesteps(objective.timesteps, steps)
    alpha_bar = torch.cumprod(1 - betas(objective).double(), 0)[times]
    if objective.zero_terminal_snr and name == "dpmsolver++":
        # A level without any signal is infinitely far away for this solver, which counts in log SNR.
        alpha_bar = alpha_bar.clamp(min=_SMALLEST_ALPHA_BAR)
    return lambda: _Solver(_diffusers_scheduler(name, alpha_bar, PREDICTION_TYPES[objective.predicted]), times)


def _diffusers_scheduler(name: str, alpha_bar: Tensor, prediction_type: str) -> Any:
    """The diffusers class called ``name`` over every level of ``alpha_bar`` (``[steps]`` float64)."""
    import diffusers

    before = torch.cat([alpha_bar.new_ones(1), alpha_bar[:-1]])
    options: dict[str, Any] = {
        "num_train_timesteps": len(alpha_bar),
        "trained_betas": (1 - alpha_bar / before).tolist(),
        "prediction_type": prediction_type,
        "timestep_spacing": "trailing",
        "thresholding": False,
    }
    if name == "dpmsolver++":
        scheduler = diffusers.DPMSolverMultistepScheduler(**options)
    elif name == "ddim":
        scheduler = diffusers.DDIMScheduler(**options, clip_sample=False)
    else:
        scheduler = diffusers.DDPMScheduler(**options, clip_sample=False)
    # Diffusers multiplies 1 - beta up in fp32, which loses the last levels of a cosine schedule.
    scheduler.alphas_cumprod = alpha_bar.float()
    scheduler.set_timesteps(len(alpha_bar))
    return scheduler


def _solve(
    predict: Callable[[Tensor, Tensor], Tensor],
    solver: _Solver,
    shape: tuple[int, int, int],
    generators: list[torch.Generator],
    device: torch.device,
    bar: Any,
) -> Tensor:
    latents = torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)
    for level in solver.scheduler.timesteps.tolist():
        time = torch.full((len(latents),), solver.times[level], device=device)
        prediction = predict(latents, time)[:, : shape[0]].float()
        step = solver.scheduler.step(prediction, level, latents, generator=generators, return_dict=False)
        latents = cast(Tensor, step[0])
        bar.update()
    return latents


def _guided(model: Denoiser, condition: Condition, null: Condition, scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The prediction of ``model`` under classifier-free guidance, over all of its channels."""
    if scale == 1.0:
        return lambda noisy, time: model(noisy, time, **condition)
    without = {
        name: null[name].to(value).expand_as(value) if name in null else value for name, value in condition.items()
    }
    both = {name: torch.cat([value, without[name]]) for name, value in condition.items()}

    def predict(noisy: Tensor, time: Tensor) -> Tensor:
        joined = model(torch.cat([noisy, noisy]), torch.cat([time, time]), **both)
        conditional, unconditional = joined.float().chunk(2)
        return unconditional + scale * (conditional - unconditional)

    return predict


def _generator(seed: int, index: int) -> torch.Generator:
    """The random numbers of image ``index``: initial noise and, for ddpm, the noise of each step."""
    mixed = np.random.SeedSequence([seed & (2**64 - 1), index]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))


def _bar(show: bool, total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=not show, desc="sampling", unit="step", leave=False)
