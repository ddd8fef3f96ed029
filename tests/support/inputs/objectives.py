"""Objectives by the name of their process."""

from typing import Any

from fastdiff.config.sections.objective import PROCESSES, ObjectiveConfig, Process


def objective_of(process: Process = "ddpm", **fields: Any) -> ObjectiveConfig:
    """The objective of ``process`` with these fields."""
    return PROCESSES[process](**fields)
