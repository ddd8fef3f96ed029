"""The sampler of a fine-tuned network: unless the run says otherwise, its pipeline's scheduler and settings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.models.family import family_of
from fastdiff.models.load import pretrained
from fastdiff.models.pipeline_files import INDEX
from fastdiff.models.pipeline_settings import PipelineSettings
from fastdiff.sampling.pipeline_solver import can_draw, describe


def settings_of(config: RunConfig) -> PipelineSettings:
    """Return the settings of the pipeline of a run's network; ConfigError: the pipeline cannot be read."""
    found = family_of(config.model).drawing(config.model)
    steps = found.distilled_steps
    return replace(found, steps=steps, guidance=1.0) if steps is not None and is_distilled(config) else found


def is_distilled(config: RunConfig) -> bool:
    """Whether the network was distilled to few steps and no guidance, by the index of the pipeline it is from."""
    return is_fine_tuned(config) and bool(pretrained(config.pretrained).json(INDEX).get("is_distilled"))


def is_fine_tuned(config: RunConfig) -> bool:
    """Whether a run trains the network of a pipeline further."""
    return config.pretrained.weights and not config.pretrained.is_file and config.model.text_conditional


def pipeline_sampler(config: RunConfig) -> SamplerConfig | None:
    """Return the sampler of the pipeline of a fine-tuned network, resolved; None: there is none that can draw it."""
    if not is_fine_tuned(config) or not can_draw(config.objective):
        return None
    found = settings_of(config)
    return SamplerConfig(scheduler="pipeline", steps=found.steps, cfg=found.guidance, cfg_norm=found.norm_patch)


def usual_negative(config: RunConfig) -> str | None:
    """Return the negative prompt of a run that has no other; None: the unconditional embedding."""
    return settings_of(config).negative if pipeline_sampler(config) is not None else None


def with_scheduler(sampler: SamplerConfig, config: RunConfig, *, shifted: bool = False) -> SamplerConfig:
    """Return ``sampler``, for the solver ``pipeline`` with the scheduler of the run's pipeline.

    Args:
        sampler: with its steps and shift decided.
        config: the run's, resolved.
        shifted: the user chose the shift, which replaces that of the pipeline.

    Raises:
        ConfigError: the pipeline cannot be read.
    """
    if sampler.scheduler != "pipeline" or not config.pretrained.path or config.pretrained.is_file:
        return sampler
    scheduler: Mapping[str, Any] = pretrained(config.pretrained).scheduler_config()
    if isinstance(config.objective, FlowConfig) and (shifted or config.sampling.shift is not None):
        scheduler = {**scheduler, "use_dynamic_shifting": False, "shift": sampler.shift}
    model = config.model
    tokens = (model.size // model.smallest_factor) ** 2
    return replace(sampler, published=describe(scheduler, settings_of(config), tokens=tokens, steps=sampler.steps))
