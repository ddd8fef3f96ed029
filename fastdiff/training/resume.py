"""Resuming a run: comparison with the requested configuration, and continuation of a published training."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from fastdiff.checkpoint.power_function import constant_name
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.checkpoint.unchanged import Metadata, check_resume, check_unchanged
from fastdiff.config.launch_options import Launch
from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.config.sections.performance import Precision
from fastdiff.console import log
from fastdiff.errors import require
from fastdiff.models.pretrained.training_state import AdamState, PublishedTraining, read_published_training
from fastdiff.parallel.fragments import Flat
from fastdiff.progress import Progress
from fastdiff.training.checkpoints import Checkpoints
from fastdiff.training.optimizer.empty_state import empty_state
from fastdiff.training.state import TrainState


def find(checkpoints: Checkpoints, launch: Launch, metadata: Metadata, folder: Path) -> Checkpoint | None:
    """Return the checkpoint to continue from, or None for a new run; called by all ranks.

    Raises:
        ConfigError: ``--resume`` excludes the state of the folder, or the run was started with another configuration.
        StorageError: no checkpoint is intact.
    """
    saved = None if launch.resume == "never" else checkpoints.newest()
    check_resume(folder, launch.resume, resumable=saved is not None)
    if saved is not None:
        check_unchanged(saved.folder, saved.manifest, metadata, launch.allow_change)
    return saved


def with_sums(config: RunConfig, saved: Checkpoint | None) -> RunConfig:
    """Fill in the dtype of sums of gradients: that of the run that is resumed, if its precision still has it; or fp32.

    A run that is older than the field goes on in its precision.
    """
    performance = config.performance
    if performance.grad_accum_dtype is not None:
        return config
    old = {} if saved is None else saved.manifest["config"]["performance"]
    found = old.get("grad_accum_dtype") or old.get("precision")
    dtype: Precision = performance.precision if found == performance.precision else "fp32"
    return replace(config, performance=replace(performance, grad_accum_dtype=dtype))


def continue_from(path: Path, state: TrainState) -> Progress:
    """Copy a published training into a freshly built state, whose module already has its weights.

    Missing parts start anew and are reported: an average of another rate at the weights, an optimizer that is not AdamW
    or was not saved without state. No such file has the learned density of timesteps.

    The schedule counts the steps of the training. AdamW may have counted fewer, if it began later or skipped steps in
    16 bits; its bias correction uses its own count. Its options are those of the configuration; differing options of
    the file are reported.

    Args:
        path: of the training, see ``read_published_training``.
        state: called by all ranks; every one reads the files.

    Returns:
        Progress of the run: after all samples of the steps that were taken.

    Raises:
        ConfigError: the training cannot be read, has other weights, or is longer than the run.
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
            log.warning(f"{path} has no average {name}: it starts at the weights")
    family = family_of(config.optim)
    if training.optimizer is not None and family.continues_adamw:
        if first:
            _report_differences(path, training, config.optim)
        for flat in state.engine.flats:
            moments = empty_state(family, flat, state.engine.shapes, state.engine.matrices, training.optimizer.applied)
            _fill(flat, moments["exp_avg"].view(-1), training.optimizer.exp_avg)
            _fill(flat, moments["exp_avg_sq"].view(-1), training.optimizer.exp_avg_sq)
            flat.states[flat.key] = moments
    elif first:
        reason = f"--optim.name is {config.optim.name}" if training.optimizer is not None else f"{path} has none"
        log.warning(f"the optimizer starts without the state of an AdamW: {reason}")
    state.engine.restore(training.step, {})
    return Progress(samples=training.step * config.batch.samples, steps=training.step)


def _report_differences(path: Path, training: PublishedTraining, optim: OptimConfig) -> None:
    """Report where the saved AdamW differs from that of the run."""
    saved, step = training.optimizer, training.step
    assert saved is not None
    if saved.applied != step:
        log.warning(
            f"{path}: its AdamW has taken {saved.applied} of {step} steps; the learning rate is that of step {step}, "
            f"the bias correction that of {saved.applied}"
        )
    theirs, ours = _options(saved), _options(optim)
    if optim.schedule != "constant":
        del theirs["lr"]  # it follows from the step
    if differing := [name for name in theirs if theirs[name] != ours[name]]:
        log.warning(
            f"{path}: its AdamW had {', '.join(f'{name} {theirs[name]}' for name in differing)}; the run uses "
            + ", ".join(f"--optim.{name} {ours[name]}" for name in differing)
        )


def _options(given: AdamState | OptimConfig) -> dict[str, str]:
    """Format the options of an AdamW as their flags are written."""
    values = {name: getattr(given, name) for name in ("lr", "betas", "eps", "weight_decay")}
    numbers = {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}
    return {name: " ".join(str(float(number)) for number in found) for name, found in numbers.items()}


def _fill(flat: Flat, target: Tensor | None, source: Mapping[str, Tensor]) -> None:
    """Copy this rank's fragments from whole tensors."""
    if target is None:
        return
    for fragment in flat.fragments:
        values = source.get(fragment.name)
        require(values is not None, f"the published training has nothing for {fragment.name}; it is of another network")
        assert values is not None
        fragment.write(target, fragment.within(values))
