"""Optimizer state in checkpoints: saving, and restoring to other numbers of ranks and ZeRO stages.

State with one entry per element or block of a parameter is saved in slices of parameters, which any layout reads. The
state of bitsandbytes is saved as raw memory and copied back into an equal layout; for another layout it is requantized
(``checkpoint.bitsandbytes_state``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastdiff.checkpoint.bitsandbytes_state import BlockwiseState, fragments_tensor, requantize
from fastdiff.checkpoint.reader import FRAGMENTS, RAW, Checkpoint
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.errors import ConfigError, StorageError
from fastdiff.parallel.fragments import Flat, layout_digest
from fastdiff.training.engines.base import Engine
from fastdiff.training.optimizer.build import PER_BLOCK, PER_ELEMENT, SLICED, lr_after, step_count
from fastdiff.training.state import TrainState
from fastdiff_kernels.adamw8bit import BLOCK


def sliced_keys(flats: Sequence[Flat]) -> list[str]:
    """Return the names of this rank's state that is saved in slices of parameters, sorted."""
    return sorted({key for flat in flats for key in flat.state} & {*PER_ELEMENT, *PER_BLOCK})


def unsliced_state(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's state that cannot be sliced, and the places of the parameters in it."""
    for index, flat in enumerate(engine.flats):
        raw = {
            key: value
            for key, value in (flat.state.items() if flat.owned else ())
            if key not in ("step", *PER_ELEMENT, *PER_BLOCK) and isinstance(value, Tensor)
        }
        yield from ((f"{RAW}{index}/{key}", value) for key, value in raw.items())
        if raw and flat.fragments:
            yield f"{FRAGMENTS}{index}", fragments_tensor(flat, list(engine.shapes))


def manifest(state: TrainState) -> dict[str, Any]:
    """Return the manifest fields of the optimizer state; called by all ranks."""
    world, engine = state.world, state.engine
    return {
        "layout": layout_digest(world, engine.flats),
        "sliced_state": sorted({key for keys in world.gather(sliced_keys(engine.flats)) for key in keys}),
        "has_raw_state": any(world.gather(any(True for _ in unsliced_state(engine)))),
        "optimizer_steps": max(world.gather(_steps(engine.flats))),
    }


def _steps(flats: Sequence[Flat]) -> int:
    """Return the step count of the optimizer; AdamW's is equal for all tensors, so that only one is read."""
    counts = [flat.state["step"] for flat in flats if "step" in flat.state]
    return int(counts[0]) if counts and isinstance(counts[0], Tensor) else max(counts, default=0)


def restore(saved: Checkpoint, state: TrainState) -> None:
    """Copy saved state of at least one step into an optimizer without state (``optim.forget``), in place.

    Called by all ranks. Exact to the bit, except for bitsandbytes' state of another number of ranks or ZeRO stage.

    Raises:
        ConfigError: on every rank, for such state without a record of the places of its parameters.
        StorageError: the checkpoint lacks a part of a parameter's state.
    """
    flats, world, manifest = state.engine.flats, state.world, saved.manifest
    if missing := set(SLICED.get(state.config.optim.name, ())) - {*manifest["sliced_state"]}:
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
        values |= _sliced(saved, flat, [key for key in manifest["sliced_state"] if key not in values])
        values["step"] = step_count(state.config.optim.name, saved.optimizer_steps, flat.key.device)
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


def _sliced(saved: Checkpoint, flat: Flat, keys: Sequence[str]) -> dict[str, Tensor]:
    """Return the state of ``flat`` that was saved in slices."""
    found = {}
    for key in keys:
        whole = flat.state.get(key)
        if whole is None:
            whole = torch.zeros_like(flat.key, requires_grad=False)
        for part in flat.blocks(BLOCK) if key in PER_BLOCK else flat.fragments:
            part.write(whole.view(-1), saved.slice(key, part))
        found[key] = whole
    return found


def check_groups(optimizer: torch.optim.Optimizer, config: OptimConfig, steps: int, applied: int) -> None:
    """Check that every parameter group matches the configuration, after ``applied`` of ``steps`` steps.

    Groups are built from the configuration and never restored; this finds anything that changes them in between.

    Raises:
        ConfigError: a group has another learning rate, betas, eps or weight decay.
    """
    expected = {
        "lr": lr_after(config, steps, applied), "betas": config.betas, "eps": config.eps,
        "weight_decay": config.weight_decay,
    }  # fmt: skip
    for number, group in enumerate(optimizer.param_groups):
        found = {key: tuple(group[key]) if key == "betas" else group[key] for key in expected}
        if found != expected:
            raise ConfigError(
                f"parameter group {number} of --optim.name {config.name} has {found} after {applied} steps, and the "
                f"configuration says {expected}; do not set the optimizer or its schedule in the DeepSpeed JSON"
            )
