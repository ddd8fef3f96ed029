"""First line of a run: its size, its length, and what was chosen for it on this machine."""

from __future__ import annotations

import math

import torch

from fastdiff.config.deepspeed import DsConfig
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import run_json
from fastdiff.console import log
from fastdiff.data.loading.batches import Batches
from fastdiff.data.loading.build import choose_loader
from fastdiff.models import kernel_choice
from fastdiff.training.state import TrainState


def announce(state: TrainState, launch: Launch, ds_config: DsConfig, batches: Batches, chosen: str) -> None:
    """Log a summary of the run, and record it in the run folder; called by all ranks."""
    if state.world.is_first:
        log.info(summary(state, batches, chosen))
    device = torch.cuda.get_device_name() if state.world.device.type == "cuda" else "cpu"
    content = run_json(state.config, launch, ds_config, device)
    state.world.on_first(lambda: state.files.write(state.folder / "run.json", content, durable=False))


def summary(state: TrainState, batches: Batches, chosen: str) -> str:
    """Summarize the run, above all the automatic choices."""
    config, world, engine = state.config, state.world, state.engine
    parameters = sum(math.prod(shape) for shape in engine.shapes.values())
    micro, accumulation = config.batch.per_rank(world.size), config.batch.accumulation(world.size)
    images = state.reader.info.samples
    parts = [
        f"{parameters / 1e6:.2f} M parameters",
        f"{world.size} ranks x {micro} samples x {accumulation} micro-batches on {world.device.type}",
        f"ZeRO-{engine.stage}, {_precision(config)}{_tf32(world.device)}, {config.optim.name}",
        f"{config.samples:,} samples of {images:,} images = {config.samples / images:.1f} epochs",
        f"loader {batches.name}{_why_not_dali(config, batches, world.device)}, "
        f"blocks {'compiled' if kernel_choice.compiles(config, world.device) else 'eager'}",
        chosen,
    ]
    if state.progress.steps:
        parts.insert(0, f"resuming from step {state.progress.steps}")
    elif (state.folder / "run.json").exists():
        parts.insert(0, "starting anew, the run that is here has no checkpoint")
    return f"{state.folder}: {'; '.join(parts)}"


def _tf32(device: torch.device) -> str:
    """Say whether fp32 matrix products and convolutions round their inputs to TF32; a CPU has none."""
    if device.type != "cuda":
        return ""
    return f", TF32 {'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'}"


def _why_not_dali(config: RunConfig, batches: Batches, device: torch.device) -> str:
    if batches.name != "prefetch" or config.data.loader != "auto":
        return ""
    return f" ({choose_loader(config.data, device)[1]})"


def _precision(config: RunConfig) -> str:
    precision, sums = config.performance.precision, config.performance.sums
    return precision if precision == "fp32" else f"{precision} with gradients added up in {sums}"
