"""The noising processes, and the choice of one by configuration."""

import torch

from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.diffusion.ddpm import Ddpm
from fastdiff.diffusion.edm import Edm
from fastdiff.diffusion.flow import Flow
from fastdiff.diffusion.levels import Levels, Process

__all__ = ["Ddpm", "Edm", "Flow", "Levels", "Process", "build_process"]


def build_process(
    config: ObjectiveConfig, device: torch.device | str, timesteps: TimestepConfig | None = None
) -> Process:
    """Return the process of ``config``, with its tables on ``device``.

    Args:
        config: process, prediction and weighting.
        device: where the tables are placed, once.
        timesteps: mean and standard deviation of edm's ln sigma; None: those of its paper.

    Raises:
        ConfigError: unknown schedule (``fastdiff.diffusion.schedules.betas``).
    """
    match config:
        case DdpmConfig():
            return Ddpm(config, device)
        case FlowConfig():
            return Flow(config)
        case EdmConfig():
            return Edm(config, timesteps.mean, timesteps.std) if timesteps else Edm(config)
