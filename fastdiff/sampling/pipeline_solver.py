"""A scheduler of diffusers by its configuration, called as the published pipeline of a network calls it.

Unlike the solvers by name (``diffusers_solvers``), which visit levels of our choice, it visits those of its own
configuration, and gets the prediction in its own form.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fastdiff.config.sections.objective import PREDICTION_TYPES, DdpmConfig, EdmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.errors import ConfigError, require
from fastdiff.models.pipeline_settings import PipelineSettings
from fastdiff.sampling.guidance import Predict

_TRAINED_LEVELS = 1000
"""``num_train_timesteps`` of a configuration without it, in diffusers."""


def describe(scheduler: Mapping[str, Any], settings: PipelineSettings, *, tokens: int, steps: int) -> str:
    """Return ``SamplerConfig.published``: all that determines the levels of a pipeline's scheduler, as JSON.

    Args:
        scheduler: content of ``scheduler_config.json``.
        settings: of the pipeline.
        tokens: of a picture.
        steps: denoising steps.
    """
    dynamic = settings.mu is not None and scheduler.get("use_dynamic_shifting", False)
    mu = settings.mu(scheduler, tokens, steps) if settings.mu is not None and dynamic else None
    found = {"scheduler": dict(scheduler), "mu": mu, "even_sigmas": settings.even_sigmas}
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def can_draw(objective: ObjectiveConfig) -> bool:
    """Whether schedulers of pipelines have the process and the prediction of a run."""
    match objective:
        case DdpmConfig():
            return objective.predicted in PREDICTION_TYPES
        case FlowConfig():
            return objective.predicted == "flow" and objective.path == "linear"
        case EdmConfig():
            return False


class PipelineSolver:
    """The scheduler that a sampler describes, with the prediction type of the training.

    Args:
        objective: process and prediction of the training.
        sampler: its ``published`` is that of ``describe``.

    Raises:
        ConfigError: it has none, the scheduler lacks the process or the prediction or is unknown to diffusers, or the
            sampler has an option of other solvers.
    """

    def __init__(self, objective: ObjectiveConfig, sampler: SamplerConfig) -> None:
        self._described = _described(objective, sampler)
        self._steps, self._objective = sampler.steps, objective
        self._new()

    @property
    def steps(self) -> int:
        """Number of evaluations of the network."""
        return len(self._new().timesteps)

    def __call__(
        self, predict: Predict, latents: Tensor, generators: list[torch.Generator], tick: Callable[[], None]
    ) -> Tensor:
        """See ``solvers.Solver``."""
        scheduler = self._new()  # for each batch: it keeps earlier predictions
        random = {"generator": generators} if "generator" in inspect.signature(scheduler.step).parameters else {}
        most, channels = scheduler.config.get("num_train_timesteps", _TRAINED_LEVELS), latents.shape[1]
        latents = latents * float(getattr(scheduler, "init_noise_sigma", 1.0))
        for level in scheduler.timesteps:
            share = float(level) / most
            noisy = scheduler.scale_model_input(latents, level) if hasattr(scheduler, "scale_model_input") else latents
            time = self._time(level, share).to(latents.device).expand(len(latents))
            output = self._sign * predict(noisy, time, share).float()[:, :channels]  # without a learned variance
            latents = cast(Tensor, scheduler.step(output, level, latents, return_dict=False, **random)[0])
            tick()
        return latents

    @property
    def _sign(self) -> float:
        """Of the prediction: schedulers of flow take the velocity from data to noise."""
        objective = self._objective
        return -1.0 if isinstance(objective, FlowConfig) and not objective.time.to_noise else 1.0

    def _time(self, level: Tensor, share: float) -> Tensor:
        """Return the time input of the network, ``[]``: int64 timesteps, or fp32 between two or in flow."""
        if isinstance(self._objective, FlowConfig):
            ends = self._objective.time
            return torch.tensor(ends.at_data + (ends.at_noise - ends.at_data) * share, dtype=torch.float32)
        return level.long() if float(level).is_integer() else level.float()

    def _new(self) -> Any:
        """Return a new scheduler, at its first level."""
        import diffusers

        config, mu = self._described["scheduler"], self._described["mu"]
        kind = getattr(diffusers, str(config.get("_class_name")), None)
        require(
            kind is not None,
            f"--scheduler pipeline: diffusers has no {config.get('_class_name')}, the scheduler of the pipeline; name "
            "another solver, for example --scheduler dpmsolver++",
        )
        scheduler = cast(Any, kind).from_config(config)
        known = inspect.signature(scheduler.set_timesteps).parameters
        shift = {"mu": mu} if mu is not None and "mu" in known else {}
        if self._described["even_sigmas"] and "sigmas" in known:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / self._steps, self._steps), **shift)
        else:
            scheduler.set_timesteps(self._steps, **shift)
        return scheduler


def _described(objective: ObjectiveConfig, sampler: SamplerConfig) -> dict[str, Any]:
    require(
        sampler.published is not None,
        "--scheduler pipeline is for a network of --pretrained.path, whose pipeline has a scheduler; name another "
        "solver, for example --scheduler dpmsolver++",
    )
    if not can_draw(objective):
        raise ConfigError(
            f"--scheduler pipeline: no scheduler of such a pipeline has --objective.process {objective.process} "
            f"--objective.prediction {objective.predicted}; name another solver, for example --scheduler dpmsolver++"
        )
    idle = {"--respacing": sampler.respacing, "--clip-denoised": sampler.clip}
    for flag, value in idle.items():
        require(not value, f"{flag} changes our own solvers; with --scheduler pipeline, leave it out")
    found: dict[str, Any] = json.loads(sampler.published or "")
    if isinstance(objective, DdpmConfig):
        found["scheduler"] |= {"prediction_type": PREDICTION_TYPES[objective.predicted]}
    return found
