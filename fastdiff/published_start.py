"""A run that goes on with a published training: its averages, the state of its AdamW, and its step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from fastdiff.config import OptimConfig
from fastdiff.errors import require
from fastdiff.fragments import Flat
from fastdiff.optim import step_count
from fastdiff.progress import Progress
from fastdiff.published_training import AdamState, PublishedTraining, read_published_training
from fastdiff.saved import constant_name
from fastdiff.state import TrainState


def go_on(path: Path, state: TrainState) -> Progress:
    """Copy a published training into a freshly built state, whose module already has its weights.

    What it does not have starts anew, and is told: an average of another rate at the weights, an optimizer that is not
    AdamW, or was not saved, without state. What the draw of timesteps has learned is in no such file.

    The schedule counts the steps of the training. AdamW may have counted fewer, if it began later or left out steps in
    16 bits, and its bias correction goes by its own count. Its options are those of the configuration; where the file
    has others, that is told.

    Args:
        path: of the training, see ``read_published_training``.
        state: called by all ranks; every one reads the files.

    Returns:
        Where the run goes on: behind all samples of the steps that were taken.

    Raises:
        ConfigError: the training cannot be read, is one of other weights, or has been longer than the run is to be.
    """
    training, config, first = read_published_training(path), state.config, state.world.is_first
    require(
        training.step < config.steps,
        f"{path} is of step {training.step}, and the run has {config.steps} steps in all; raise --samples",
    )
    for name, averages in state.ema.averages.items():
        found = {constant_name(rate): weights for rate, weights in training.averages.items()}.get(name)
        if found is not None:
            for flat, average in zip(state.engine.flats, averages, strict=True):
                _fill(flat, average, found)
        elif first:
            tqdm.write(f"{path} has no average {name}: it starts at the weights")
    if training.optimizer is not None and config.optim.name == "adamw":
        if first:
            _tell(path, training, config.optim)
        for flat in state.engine.flats:
            flat.states[flat.key] = _adamw(flat, training.optimizer)
    elif first:
        reason = f"--optim.name is {config.optim.name}" if training.optimizer is not None else f"{path} has none"
        tqdm.write(f"the optimizer starts without the state of an AdamW: {reason}")
    state.engine.restore(training.step, {})
    return Progress(samples=training.step * config.batch.samples, steps=training.step)


def _tell(path: Path, training: PublishedTraining, optim: OptimConfig) -> None:
    """Say what of the state of AdamW is not what the run goes on with."""
    saved, step = training.optimizer, training.step
    assert saved is not None
    if saved.applied != step:
        tqdm.write(
            f"{path}: its AdamW has taken {saved.applied} of {step} steps; the learning rate is that of step {step}, "
            f"the bias correction that of {saved.applied}"
        )
    theirs, ours = _options(saved), _options(optim)
    if optim.schedule != "constant":
        del theirs["lr"]  # it follows from the step
    if differing := [name for name in theirs if theirs[name] != ours[name]]:
        tqdm.write(
            f"{path}: its AdamW had {', '.join(f'{name} {theirs[name]}' for name in differing)}; the run goes on with "
            + ", ".join(f"--optim.{name} {ours[name]}" for name in differing)
        )


def _options(given: AdamState | OptimConfig) -> dict[str, str]:
    """As the flags are written."""
    numbers = {"lr": (given.lr,), "betas": given.betas, "eps": (given.eps,), "weight_decay": (given.weight_decay,)}
    return {name: " ".join(str(float(number)) for number in values) for name, values in numbers.items()}


def _adamw(flat: Flat, saved: AdamState) -> dict[str, Tensor | int]:
    moments = {name: torch.zeros_like(flat.key, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    _fill(flat, moments["exp_avg"].view(-1), saved.exp_avg)
    _fill(flat, moments["exp_avg_sq"].view(-1), saved.exp_avg_sq)
    return {**moments, "step": step_count("adamw", saved.applied, flat.key.device)}


def _fill(flat: Flat, target: Tensor | None, source: Mapping[str, Tensor]) -> None:
    """Copy this rank's fragments of whole tensors."""
    if target is None:
        return
    for fragment in flat.fragments:
        values = source.get(fragment.name)
        require(values is not None, f"the published training has nothing for {fragment.name}; it is of another network")
        assert values is not None
        fragment.of(target).copy_(values.flatten()[fragment.start : fragment.start + fragment.numel])
