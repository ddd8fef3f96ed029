"""How noise comes in: the processes, each a map from a noise level to coefficients, and the draw of the levels."""

from __future__ import annotations

import torch

from fastdiff.config.objective import DdpmConfig, EdmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.timesteps import TimestepConfig
from fastdiff.diffusion.ddpm import Ddpm
from fastdiff.diffusion.edm import Edm
from fastdiff.diffusion.flow import Flow
from fastdiff.diffusion.levels import Levels, Process

__all__ = ["Ddpm", "Edm", "Flow", "Levels", "Process", "build_process"]


def build_process(
    config: ObjectiveConfig, device: torch.device | str, timesteps: TimestepConfig | None = None
) -> Process:
    """The process of ``config``, with its tables on ``device``.

    Args:
        config: process, prediction and weighting.
        device: where the tables are placed, once.
        timesteps: how the levels are drawn: mean and deviation of the ln sigma of edm; None: those of its paper.

    Raises:
        ConfigError: a schedule that does not exist (``schedule.betas``).
    """
    match config:
        case DdpmConfig():
            return Ddpm(config, device)
        case FlowConfig():
            return Flow(config)
        case EdmConfig():
            return Edm(config, timesteps.mean, timesteps.std) if timesteps else Edm(config)
