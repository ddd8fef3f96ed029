"""Resuming a run: comparison with the requested configuration, and continuation of a published training."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.checkpoint.power_function import constant_name
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.config.config_file import with_kind
from fastdiff.config.launch_options import Launch
from fastdiff.config.objective import DEFAULTS
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.config.sections.performance import Precision
from fastdiff.console import log
from fastdiff.errors import ConfigError, require
from fastdiff.models.pretrained.training_state import AdamState, PublishedTraining, read_published_training
from fastdiff.parallel.fragments import Flat
from fastdiff.progress import Progress
from fastdiff.training.checkpoints import Checkpoints
from fastdiff.training.optimizer.build import step_count
from fastdiff.training.state import TrainState

Facts = dict[str, Any]

FREE = (
    "output.",
    "validation.",
    "data.path",
    "data.image_root",
    "data.cache",
    "data.damaged",
    "data.loader",
    "data.prefetch",
    "data.workers",
    "batch.micro",
    "ema.snapshot_every",
    "objective.plugin",
    "divergence.limit",
    "performance.device",
    "performance.engine",
    "performance.cuda_graph",
    "performance.recompute",
    "performance.profile",
)
"""Fields, or sections that end with a dot, that may differ at a resume: they change nothing, or rounding alone
(``batch.micro``, ``performance.engine``). The code of ``objective.plugin`` is compared by its digest."""
_OF_RESULT = ("plugin.network", "plugin.objective")
"""Plug-ins that decide the result of a run (``run_record.plugins``)."""
_SUMS = "performance.grad_accum_dtype"
_OBJECTIVE = {f"objective.{name}": value for name, value in DEFAULTS.items()}


def find(checkpoints: Checkpoints, launch: Launch, facts: Facts, folder: Path) -> Checkpoint | None:
    """Return the checkpoint to continue from, or None for a new run; called by all ranks.

    Raises:
        ConfigError: ``--resume`` excludes the state of the folder, or the run was started with another configuration.
        StorageError: no checkpoint is intact.
    """
    if launch.resume == "never":
        if (folder / "run.json").exists():
            raise ConfigError(f"--resume never: {folder} holds a run; delete it or choose another --output.folder")
        return None
    saved = checkpoints.newest()
    if saved is None and launch.resume == "must":
        raise ConfigError(f"--resume must: {folder} has no checkpoint; use --resume auto to start a new run")
    if saved is not None:
        check_unchanged(saved, facts, launch.allow_change)
    return saved


def check_unchanged(saved: Checkpoint, facts: Facts, allowed: Sequence[str]) -> None:
    """Raise ConfigError with a diff if the configuration, the data set or the base of a LoRA has changed."""
    saved.require("config", "dataset")
    _check_known(allowed, facts["config"])
    changes = config_changes(saved.manifest["config"], facts["config"], allowed)
    if saved.manifest["dataset"] != facts["dataset"] and "dataset" not in allowed:
        changes["dataset"] = f"{saved.manifest['dataset'][:12]} -> {facts['dataset'][:12]} (digest)"
    base, now = saved.manifest.get("base"), facts["base"]
    if base is not None and now is not None and base != now and "base" not in allowed:
        changes["base"] = f"{base[:12]} -> {now[:12]} (digest of the weights that the LoRA is added to)"
    changes |= _plugin_changes(saved.manifest.get("versions", {}), facts["versions"], allowed)
    if not changes:
        return
    diff = "\n".join(f"  --{key}: {change}" for key, change in changes.items())
    accept = " ".join(f"--allow-change {key}" for key in changes)
    raise ConfigError(
        f"the run in {saved.folder.parent.parent} was started with another configuration:\n{diff}\n"
        f"change it back, choose another --output.folder, or accept it with {accept}"
    )


def _plugin_changes(saved: Mapping[str, str], now: Mapping[str, str], allowed: Sequence[str]) -> dict[str, str]:
    """Return the plug-ins with another code; the folder of a file does not count."""
    return {
        name: f"{saved.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in _OF_RESULT
        if _code(saved.get(name)) != _code(now.get(name)) and name not in allowed
    }


def _code(identified: str | None) -> str | None:
    return None if identified is None else identified.rpartition(":")[2]


def config_changes(saved: dict[str, Any], now: dict[str, Any], allowed: Sequence[str]) -> dict[str, str]:
    """Return the differing fields that make two configurations different runs.

    ``FREE`` and ``allowed`` fields do not count, nor does the length of the run under a constant learning rate.
    """
    free = (*FREE, "samples") if str(now["optim"]["schedule"]).startswith("constant") else FREE
    defaults = flatten(as_json(with_kind(RunConfig(), saved, "the checkpoint")))
    new = _OBJECTIVE | flatten(now)
    # Fields newer than the run, and fields that its process lacks, have their defaults.
    old = _OBJECTIVE | {key: value for key, value in defaults.items() if key in new} | flatten(saved)
    old[_SUMS] = old[_SUMS] or old["performance.precision"]  # runs older than the field added up in their precision
    new[_SUMS] = new[_SUMS] or old[_SUMS]
    return {
        key: f"{json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in allowed and not _is_free(key, free)
    }


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


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name."""
    flat = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def _is_free(key: str, free: Sequence[str]) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in free)


def _check_known(allowed: Sequence[str], config: dict[str, Any]) -> None:
    known = ["dataset", "base", *_OF_RESULT, *(_OBJECTIVE | flatten(config))]
    for key in allowed:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--allow-change {key}: there is no such field{hint}")


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
    if training.optimizer is not None and config.optim.name == "adamw":
        if first:
            _report_differences(path, training, config.optim)
        for flat in state.engine.flats:
            flat.states[flat.key] = _adamw(flat, training.optimizer)
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
    """Format options as their flags are written."""
    numbers = {"lr": (given.lr,), "betas": given.betas, "eps": (given.eps,), "weight_decay": (given.weight_decay,)}
    return {name: " ".join(str(float(number)) for number in values) for name, values in numbers.items()}


def _adamw(flat: Flat, saved: AdamState) -> dict[str, Tensor | int]:
    moments = {name: torch.zeros_like(flat.key, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    _fill(flat, moments["exp_avg"].view(-1), saved.exp_avg)
    _fill(flat, moments["exp_avg_sq"].view(-1), saved.exp_avg_sq)
    return {**moments, "step": step_count("adamw", saved.applied, flat.key.device)}


def _fill(flat: Flat, target: Tensor | None, source: Mapping[str, Tensor]) -> None:
    """Copy this rank's fragments from whole tensors."""
    if target is None:
        return
    for fragment in flat.fragments:
        values = source.get(fragment.name)
        require(values is not None, f"the published training has nothing for {fragment.name}; it is of another network")
        assert values is not None
        fragment.write(target, fragment.within(values))
