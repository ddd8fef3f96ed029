"""Optimizer state in checkpoints: saving, and restoring to other numbers of ranks and ZeRO stages.

State is saved in slices of parameters, which any layout reads, if its family says so (``OptimizerFamily.sliced``). The
state of bitsandbytes is saved as raw memory and copied back into an equal layout; for another layout it is requantized
(``checkpoint.bitsandbytes_state``).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastdiff.checkpoint.bitsandbytes_state import BlockwiseState, fragments_tensor, requantize
from fastdiff.checkpoint.reader import FRAGMENTS, RAW, Checkpoint
from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.errors import ConfigError, StorageError, require
from fastdiff.parallel.fragments import Flat, Sizes, layout_digest
from fastdiff.training.optimizer.build import MULTIPLIER, check_state, numbers_of_group
from fastdiff.training.optimizer.empty_state import sizes_of, step_count, zeros
from fastdiff.training.optimizer.lr_schedule import lr_factor
from fastdiff.training.state import TrainState


def sliced_state(state: TrainState) -> dict[str, Sizes | None]:
    """Return the state that is saved in slices of parameters, sorted by name.

    Returns:
        For each tensor the elements of a parameter that share an entry, by parameter; None: each has its own.
    """
    family = family_of(state.config.optim)
    tensors = sorted(family.state, key=lambda tensor: tensor.name) if family.sliced else []
    return {tensor.name: sizes_of(tensor, state.engine.shapes, state.engine.matrices) for tensor in tensors}


def sliced_keys(state: TrainState) -> list[str]:
    """Return the names of the sliced state that this rank has; an optimizer may have none before its first step."""
    found = {key for flat in state.engine.flats for key in flat.state}
    return [name for name in sliced_state(state) if name in found]


def unsliced_state(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's state that cannot be sliced, and the places of the parameters in it."""
    engine, sliced = state.engine, sliced_state(state)
    for index, flat in enumerate(engine.flats):
        raw = {
            key: value
            for key, value in (flat.state.items() if flat.owned else ())
            if key != "step" and key not in sliced and isinstance(value, Tensor)
        }
        yield from ((f"{RAW}{index}/{key}", value) for key, value in raw.items())
        if raw and flat.fragments:
            yield f"{FRAGMENTS}{index}", fragments_tensor(flat, list(engine.shapes))


def manifest(state: TrainState) -> dict[str, Any]:
    """Return the manifest fields of the optimizer state; called by all ranks.

    Raises:
        ConfigError: the optimizer keeps other state than its family declares: a checkpoint would lack it.
    """
    world, engine = state.world, state.engine
    _require_declared(state)
    return {
        "layout": layout_digest(world, engine.flats),
        "sliced_state": sorted({key for keys in world.gather(sliced_keys(state)) for key in keys}),
        "has_raw_state": any(world.gather(any(True for _ in unsliced_state(state)))),
        "optimizer_steps": max(world.gather(_steps(state))),
    }


def _require_declared(state: TrainState) -> None:
    family = family_of(state.config.optim)
    declared = {*sliced_state(state), *(["step"] if family.counts else [])}
    for kept in ({*flat.state} for flat in state.engine.flats):
        require(
            not family.sliced or kept in (set(), declared),
            f"--optim.name {family.name} keeps the state {', '.join(sorted(kept))}, and its OptimizerFamily declares "
            f"{', '.join(sorted(declared)) or 'none'}; name each in state, and say by counts how it keeps step",
        )
    check_state(family, [flat for flat in state.engine.flats if flat.state])


def _steps(state: TrainState) -> int:
    """Return the step count of the optimizer; AdamW's is equal for all tensors, so that only one is read."""
    if family_of(state.config.optim).counts is None:
        return state.progress.applied
    flats = state.engine.flats
    counts = [flat.state["step"] for flat in flats if "step" in flat.state]
    return int(counts[0]) if counts and isinstance(counts[0], Tensor) else max(counts, default=0)


def restore(saved: Checkpoint, state: TrainState) -> None:
    """Copy saved state of at least one step into an optimizer without state (``optimizer.build.forget``), in place.

    Called by all ranks. Exact to the bit, except for bitsandbytes' state of another number of ranks or ZeRO stage.

    Raises:
        ConfigError: on every rank, for such state without a record of the places of its parameters.
        StorageError: the checkpoint lacks a part of a parameter's state.
    """
    flats, world, manifest = state.engine.flats, state.world, saved.manifest
    if missing := sliced_state(state).keys() - {*manifest["sliced_state"]}:
        raise StorageError(
            f"{saved.folder}: lacks {min(missing)} of the optimizer, which has taken {saved.optimizer_steps} steps; "
            "restore the checkpoint from a copy",
            everywhere=True,
        )
    anew = manifest["has_raw_state"] and layout_digest(world, flats) != manifest["layout"]
    blockwise = _blockwise(saved) if anew else None
    for index, flat in enumerate(flats):
        if blockwise is not None:
            requantize(flat, blockwise)
            values = flat.state
        else:
            values = {key: _copied(value, flat, key) for key, value in saved.unsliced_state(index, world.rank).items()}
        values |= _sliced(saved, flat, state)
        values |= step_count(family_of(state.config.optim), saved.optimizer_steps, flat)
        flat.states[flat.key] = values


def _copied(value: Tensor, flat: Flat, key: str) -> Tensor:
    """Return ``value`` in the memory that the optimizer has for it."""
    held = flat.state.get(key)
    return value.to(flat.key.device) if held is None else held.copy_(value)


def _blockwise(saved: Checkpoint) -> BlockwiseState:
    if not any(True for _ in saved.keys(FRAGMENTS)):
        raise ConfigError(
            f"{saved.folder} holds the state of bitsandbytes of {saved.manifest['world_size']} ranks at ZeRO stage "
            f"{saved.manifest['zero_stage']}, and does not record the places of its parameters (written by an older "
            "fastdiff); resume with the same ranks and stage, and save once"
        )
    return BlockwiseState(saved)


def _sliced(saved: Checkpoint, flat: Flat, state: TrainState) -> dict[str, Tensor]:
    """Return the state of ``flat`` that was saved in slices."""
    found, engine, family = {}, state.engine, family_of(state.config.optim)
    for tensor in family.state if family.sliced else ():
        sizes, whole = sizes_of(tensor, engine.shapes, engine.matrices), flat.state.get(tensor.name)
        if whole is None:
            whole = zeros(tensor, flat, engine.shapes, engine.matrices)
        for part in flat.fragments if sizes is None else flat.blocks(sizes):
            if part.numel:
                part.write(whole.view(-1), saved.slice(tensor.name, part))
        found[tensor.name] = whole
    return found


def check_groups(optimizer: torch.optim.Optimizer, config: OptimConfig, steps: int, applied: int) -> None:
    """Check that every parameter group matches the configuration, after ``applied`` of ``steps`` steps.

    Groups are built from the configuration and never restored; this finds anything that changes them in between.

    Raises:
        ConfigError: a group has another learning rate or another hyper-parameter.
    """
    factor = lr_factor(config, steps)(applied)
    for number, group in enumerate(optimizer.param_groups):
        given = {**config.hyper_parameters(), **numbers_of_group(config, group.get(MULTIPLIER, 1.0))}
        given["lr"] *= factor
        expected = {key: value for key, value in given.items() if key in group}  # a class may keep some elsewhere
        found = {key: tuple(group[key]) if isinstance(group[key], list) else group[key] for key in expected}
        if found != expected:
            raise ConfigError(
                f"parameter group {number} of --optim.name {config.name} has {found} after {applied} steps, and the "
                f"configuration says {expected}; do not set the optimizer or its schedule in the DeepSpeed JSON"
            )
