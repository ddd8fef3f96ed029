"""A run of a tiny network on one process: its folder, its configuration and its training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fastdiff.config.launch_options import Launch
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.data import DataConfig, ValidationConfig
from fastdiff.config.sections.ema import EmaConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.errors import DivergedError
from fastdiff.evaluation import validation_files
from fastdiff.parallel.world import start_world
from fastdiff.training.loop import train
from fastdiff_bench.measure.paired_runs import Study


def folder_of(trial: Study, root: Path) -> Path:
    """Return the folder of a run below ``root``."""
    parts = (trial.case, f"seed {trial.seed}", trial.name)
    return root.joinpath(*(part.replace(", ", "-").replace(" ", "-").replace("^", "") for part in parts))


def config_of(
    folder: Path, model: ModelConfig, optim: OptimConfig, *, data: Path, validation: ValidationConfig,
    steps: int, batch: int, seed: int,
) -> RunConfig:  # fmt: skip
    """Return the preset of the digits with these parts; its learning rate rises for a tenth of the steps, then falls.

    It writes no images and no checkpoint but the last.
    """
    return replace(
        preset("digits"),
        samples=steps * batch,
        seed=seed,
        model=model,
        data=DataConfig(path=str(data), loader="prefetch"),
        validation=validation,
        batch=BatchConfig(samples=batch),
        optim=replace(optim, schedule="cosine", warmup_steps=steps // 10),
        ema=EmaConfig(rates=(0.95,)),
        output=OutputConfig(folder=str(folder), checkpoint_every=0, sample_every=0, report_to=(), log_every=10),
    )


def run(config: RunConfig) -> None:
    """Train to the end, or what is left of it; DivergedError: a held-out loss is not finite."""
    train(config, Launch(deepspeed={"zero_optimization": {"stage": 0}}), start_world())
    folder = Path(config.output.folder)
    for step in validation_files.steps_of(folder):
        if not np.isfinite(validation_files.read(folder, step).loss).all():
            raise DivergedError(f"the held-out loss at step {step} is not finite; the run diverged")
