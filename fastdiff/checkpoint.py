"""Checkpoints: the whole state of a run, and its way back.

They are committed as ``fastdiff.commit`` describes, and only then old ones are pruned. There is no ``latest`` file to
go stale: the newest one that is intact counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from fastdiff.commit import StepFolders
from fastdiff.dist import World
from fastdiff.errors import ConfigError, StorageError, require
from fastdiff.fragments import Flat, Fragment, layout_digest, owned_blocks, owned_fragments
from fastdiff.optim import PER_BLOCK, PER_ELEMENT, step_count
from fastdiff.progress import Progress
from fastdiff.saved import FORMAT, METERS, TIMESTEPS, VERSION, Saved, committed, problems
from fastdiff.state import TrainState
from fastdiff_kernels.adamw8bit import BLOCK


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: ``runs/NAME/checkpoints``.
        keep: how many to keep; never fewer than two verified ones remain.
        world: the ranks; every method is called by all of them.
    """

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self._folder = folder
        self._folders = StepFolders(folder, world, "a checkpoint")
        self._keep = keep
        self._world = world
        self._verified: set[Path] = set()

    def newest(self) -> Saved | None:
        """Return the newest checkpoint that verifies, or None if there is none at all.

        Damaged ones are passed over with a warning. StorageError if there are some and none is intact: starting
        again from nothing would look like a resume.
        """
        folders = self._world.on_first(lambda: committed(self._folder))
        damage = []
        for folder in folders:
            share = problems(folder, self._world.rank, self._world.size)
            found = [problem for ranks in self._world.gather(share) for problem in ranks]
            if not found:
                self._verified.add(folder)
                return Saved(folder)
            damage += found
            if self._world.is_first:
                tqdm.write(f"warning: passing over a damaged checkpoint: {found[0]}")
        if damage:
            raise StorageError(
                f"none of the {len(folders)} checkpoints in {self._folder} is intact ({damage[0]}); restore one "
                "from a copy, or start again with another --output.folder",
                everywhere=True,
            )
        return None

    def save(self, state: TrainState) -> None:
        """Write and commit ``state``, then prune.

        Raises:
            StorageError: on every rank, if any rank could not write. Earlier checkpoints are as they were.
        """
        tensors, starts = _tensors(state)
        self._verified.add(self._folders.save(state.progress.steps, tensors, starts, _manifest(state)))
        self._world.on_first(self._prune)

    def _prune(self) -> None:
        """Delete what is older than the ``keep`` newest, once two of the kept ones are known to be intact."""
        folders = committed(self._folder)
        kept, old = folders[: self._keep], folders[self._keep :]
        if old and self._two_are_intact(kept):
            self._folders.remove(old)

    def _two_are_intact(self, folders: Sequence[Path]) -> bool:
        intact = 0
        for folder in folders:
            if folder in self._verified or not problems(folder):
                self._verified.add(folder)
                intact += 1
            if intact == 2:
                return True
        return False


def restore(saved: Saved, state: TrainState) -> Progress:
    """Copy a checkpoint into a freshly built state, whose module already has the saved weights.

    Optimizer state goes to any number of ranks and any ZeRO stage, that of bitsandbytes only to the same layout.
    What the checkpoint does not have starts anew: an added average of constant rate at the weights, another optimizer
    without state, another density of timesteps without losses. A power-function average cannot: it is one of the whole
    course of the weights.

    Raises:
        ConfigError: on every rank, for bitsandbytes' state of another layout, or an added power-function average.
    """
    manifest, engine = saved.manifest, state.engine
    progress = Progress(**manifest["progress"])
    if progress.applied:
        _check_widths(saved, state.ema.power_stds)
    for flat in engine.flats:
        for fragment in flat.fragments:
            fragment.of(flat.master).copy_(saved.slice("master", fragment))
    if progress.applied and manifest["config"]["optim"]["name"] == state.config.optim.name:
        _restore_optimizer(saved, state, progress.applied)
    for name, averages in state.ema.averages.items():
        kind = f"ema/{name}" if name in saved.averages else "master"
        for flat, average in zip(engine.flats, averages, strict=True):
            if average is not None:
                for fragment in flat.fragments:
                    fragment.of(average).copy_(saved.slice(kind, fragment))
    state.meters.restore(saved.meters(state.world.rank, state.world.size))
    state.objective.timesteps.restore(saved.timesteps())
    engine.restore(progress.applied, manifest["loss_scale"])
    return progress


def _check_widths(saved: Saved, wanted: Sequence[float]) -> None:
    added = [str(std) for std in wanted if std not in saved.ema_stds]
    require(
        not added,
        f"{saved.folder} has averages of the widths {list(saved.ema_stds)}; --ema.power_stds {' '.join(added)} would "
        "miss all steps before it. Drop what is added, or start a new run in another --output.folder",
    )


def _restore_optimizer(saved: Saved, state: TrainState, applied: int) -> None:
    manifest, world = saved.manifest, state.world
    if manifest["has_raw_state"] and layout_digest(world, state.engine.flats) != manifest["layout"]:
        raise ConfigError(
            f"{saved.folder} holds the state of bitsandbytes of {manifest['world_size']} ranks at ZeRO stage "
            f"{manifest['zero_stage']}, whose blocks cannot be cut anew; resume with the same ranks and stage"
        )
    for index, flat in enumerate(state.engine.flats):
        values: dict[str, Any] = {k: v.to(flat.key.device) for k, v in saved.raw(index, world.rank).items()}
        for key in manifest["sliced_state"]:
            if key not in values:
                whole = flat.state.get(key)
                if whole is None:
                    whole = torch.zeros_like(flat.key, requires_grad=False)
                for part in flat.blocks(BLOCK) if key in PER_BLOCK else flat.fragments:
                    part.of(whole.view(-1)).copy_(saved.slice(key, part))
                values[key] = whole
        values["step"] = step_count(state.config.optim.name, applied, flat.key.device)
        flat.states[flat.key] = values


def common_manifest(state: TrainState) -> dict[str, Any]:
    """What the manifests of checkpoints and of snapshots record."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "progress": asdict(state.progress),
        "world_size": state.world.size,
        "zero_stage": state.engine.stage,
        "parameters": state.engine.shapes,
        "ema_rates": list(state.ema.rates),
        "ema_stds": list(state.ema.power_stds),
        **state.facts,
    }


def _manifest(state: TrainState) -> dict[str, Any]:
    world, engine = state.world, state.engine
    return {
        **common_manifest(state),
        "layout": layout_digest(world, engine.flats),
        "sliced_state": sorted({key for keys in world.gather(_sliced_keys(engine.flats)) for key in keys}),
        "has_raw_state": any(world.gather(any(True for _ in _raw_state(engine.flats)))),
        "loss_scale": engine.loss_scale,
    }


def _sliced_keys(flats: Sequence[Flat]) -> list[str]:
    return sorted({key for flat in flats for key in flat.state} & {*PER_ELEMENT, *PER_BLOCK})


def _raw_state(flats: Sequence[Flat]) -> Iterator[tuple[str, Tensor]]:
    for index, flat in enumerate(flats):
        for key, value in flat.state.items() if flat.owned else ():
            if key not in ("step", *PER_ELEMENT, *PER_BLOCK) and isinstance(value, Tensor):
                yield f"raw/{index}/{key}", value


def _slices(flats: Sequence[Flat], kind: str, tensors: Sequence[Tensor | None]) -> Iterator[tuple[Fragment, Tensor]]:
    return owned_blocks(flats, tensors, BLOCK) if kind in PER_BLOCK else owned_fragments(flats, tensors)


def _tensors(state: TrainState) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return this rank's share of a checkpoint and, for the sliced tensors, where each starts in its parameter."""
    flats = state.engine.flats
    kinds: dict[str, Sequence[Tensor | None]] = {"master": [flat.master for flat in flats]}
    kinds |= {f"ema/{name}": averages for name, averages in state.ema.averages.items()}
    for key in _sliced_keys(flats):
        kinds[key] = [flat.state[key].view(-1) if key in flat.state else None for flat in flats]
    tensors, starts = sliced(flats, kinds)
    tensors[METERS] = state.meters.sums
    if state.world.is_first:  # the same on every rank
        tensors |= {TIMESTEPS + name: values for name, values in state.objective.timesteps.state().items()}
    return tensors | dict(_raw_state(flats)), starts


def sliced(
    flats: Sequence[Flat], kinds: Mapping[str, Sequence[Tensor | None]]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Cut what stands for the flats, by kind, into this rank's ``<kind>/<parameter>`` and their starts."""
    tensors, starts = {}, {}
    for kind, flat_tensors in kinds.items():
        for fragment, values in _slices(flats, kind, flat_tensors):
            tensors[f"{kind}/{fragment.name}"] = values
            starts[f"{kind}/{fragment.name}"] = fragment.start
    return tensors, starts
