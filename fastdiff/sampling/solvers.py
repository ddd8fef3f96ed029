"""Sampling from a trained model.

A solver takes latents from noise to data along the noise levels that it visits: those of diffusers
(``diffusers_solvers``), those of flow in its own time (``flow_solvers``), and that of a published pipeline
(``pipeline_solver``).
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.sections.objective import ObjectiveConfig
from fastdiff.config.sections.sampler import SamplerConfig, SchedulerName
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.errors import ConfigError, require
from fastdiff.progress_bar import Bar
from fastdiff.sampling.diffusers_solvers import DiffusersSolver
from fastdiff.sampling.flow_solvers import euler_maruyama_solver, euler_solver, heun_solver, normal
from fastdiff.sampling.guidance import Denoiser, Guidance, Predict, guided
from fastdiff.sampling.joint_state import JointState
from fastdiff.sampling.pipeline_solver import PipelineSolver

_LABELS = (1,)
"""Spawn key that makes the random labels independent of the noise."""


class Solver(Protocol):
    """A solver over the noise levels of one trajectory."""

    @property
    def steps(self) -> int:
        """Number of steps."""

    def __call__(
        self, predict: Predict, latents: Tensor, generators: list[torch.Generator], tick: Callable[[], None]
    ) -> Tensor:
        """Take all steps from ``latents [B, C, H, W]`` fp32 of pure noise, and call ``tick`` after each.

        Args:
            predict: the guided model.
            latents: drawn from ``generators``.
            generators: further random numbers of each image, for solvers that add noise.
            tick: called after each step.

        Returns:
            ``[B, C, H, W]`` fp32.
        """


SOLVERS: dict[SchedulerName, Callable[[ObjectiveConfig, SamplerConfig], Solver]] = {
    "ddim": DiffusersSolver,
    "dpmsolver++": DiffusersSolver,
    "ddpm": DiffusersSolver,
    "euler": euler_solver,
    "heun": heun_solver,
    "euler-maruyama": euler_maruyama_solver,
    "pipeline": PipelineSolver,
}
"""What builds each solver from the objective of the training and a sampler whose shift is a number."""


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


def solver_of(objective: ObjectiveConfig, sampler: SamplerConfig, shape: tuple[int, int, int]) -> Solver:
    """Return the solver of a sampler for latents of ``(C, H, W)``; the errors are those of ``sample``."""
    _check_channels(sampler.cfg_channels, shape[0])
    shift = None if sampler.shift is None else TimestepConfig(shift=sampler.shift).time_shift(prod(shape))
    return SOLVERS[sampler.scheduler](objective, replace(sampler, shift=shift))


@torch.no_grad()
def sample(
    model: Denoiser,
    objective: ObjectiveConfig,
    condition: Condition,
    sampler: SamplerConfig,
    *,
    shape: tuple[int, int, int],
    teacher_width: int = 0,
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
        teacher_width: Width of the class token of a teacher, which is drawn with the latents; 0: none.
        null: One unconditional sample of each input that guidance replaces, as in ``Objective``.
        batch: Images per forward pass (guidance doubles them inside).
        first_index: Number of the first image within a larger set, 0 or above.
        progress: Show a progress bar on standard error.

    Returns:
        ``[N, C, H, W]`` fp32 latents on the device of the condition, not clipped.

    Raises:
        ConfigError: Invalid steps or channels, a solver of another process, or epsilon prediction from pure noise.
    """
    solver = solver_of(objective, sampler, shape)
    state = JointState(shape, teacher_width)
    require(
        not (teacher_width and sampler.clip),
        "--clip-denoised clamps pixels, and would clamp the class token of a teacher, too; leave it out",
    )
    guidance = Guidance(
        scale=1.0 if sampler.cfg is None else sampler.cfg,
        channels=state.guided(sampler.cfg_channels),
        interval=sampler.cfg_interval or (0.0, 1.0),
        norm=sampler.cfg_norm,
    )
    count, device = next((len(value), value.device) for value in condition.values())
    parts = [torch.empty(0, *shape, device=device)]
    with Bar("sampling", -(-count // batch) * solver.steps, "steps", shown=progress) as bar:
        for start in range(0, count, batch):
            chosen = {name: value[start : start + batch] for name, value in condition.items()}
            index = range(first_index + start, first_index + min(start + batch, count))
            generators = [_generator(sampler.seed, i) for i in index]
            predict = guided(state.denoiser(model), chosen, null, guidance)
            noise = state.noise(normal(generators, state.shape, device), coupled=sampler.coupled_noise)
            parts.append(state.without_token(solver(predict, noise, generators, bar.update)))
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


def _generator(seed: int, index: int) -> torch.Generator:
    """Return the random numbers of image ``index``: initial noise and, for ddpm, the noise of each step."""
    return torch.Generator().manual_seed(int(_sequence(seed, index).generate_state(1, np.uint64)[0]))


def _sequence(seed: int, index: int, spawn_key: tuple[int, ...] = ()) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed & (2**64 - 1), index], spawn_key=spawn_key)
