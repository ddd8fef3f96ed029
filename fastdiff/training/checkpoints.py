"""Saving and restoring the whole state of a run.

Checkpoints are committed as described in ``fastdiff.checkpoint.step_folders``; old ones are pruned only afterwards.
There is no ``latest`` file to go stale: the newest intact checkpoint counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fastdiff.checkpoint.manifest import FORMAT, VERSION, committed, step_of, verify
from fastdiff.checkpoint.reader import FP8, METERS, SPIKES, TIMESTEPS, Checkpoint
from fastdiff.checkpoint.step_folders import Draft, StepFolders
from fastdiff.console import log
from fastdiff.errors import StorageError, require
from fastdiff.parallel.fragments import Flat, Sizes, owned_blocks, owned_fragments
from fastdiff.parallel.world import World
from fastdiff.progress import Progress
from fastdiff.training import optimizer_state
from fastdiff.training.state import TrainState


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: ``runs/NAME/checkpoints``.
        keep: number to keep; pruning leaves at least two that this process committed or verified, with ``keep`` 1 one.
        world: the ranks; all of them call every method. It has a separate process group if commits run beside the
            training.
        pinned_gib: limit of the pinned memory of the copy that is written.
    """

    def __init__(self, folder: Path, keep: int, world: World, pinned_gib: float = math.inf) -> None:
        self._folder = folder
        self._folders = StepFolders(folder, world, "a checkpoint", pinned_gib)
        self._keep = keep
        self._world = world
        self._verified: set[Path] = set()

    def newest(self, before: int | None = None) -> Checkpoint | None:
        """Return the newest intact checkpoint of a step below ``before``; None if there are no checkpoints.

        Damaged ones are skipped with a warning. StorageError if all are damaged: a new start would look like a resume.
        """
        folders = self._world.on_rank0(lambda: committed(self._folder))
        folders = [folder for folder in folders if before is None or step_of(folder) < before]
        damage = []
        for folder in folders:
            share = verify(folder, self._world.rank, self._world.size)
            found = [problem for ranks in self._world.gather(share) for problem in ranks]
            if not found:
                self._verified.add(folder)
                return Checkpoint(folder)
            damage += found
            if self._world.is_first:
                log.warning(f"passing over a damaged checkpoint: {found[0]}")
        if damage:
            raise StorageError(
                f"none of the {len(folders)} checkpoints in {self._folder} is intact ({damage[0]}); restore one "
                "from a copy, or start again with another --output.folder",
                everywhere=True,
            )
        return None

    def draft(self, state: TrainState) -> Draft:
        """Copy ``state`` for ``commit``, in the training thread, after the last one; StorageError on all: no memory."""
        tensors, starts = _tensors(state)
        return self._folders.draft(state.world, state.progress.steps, tensors, starts, _manifest(state))

    def commit(self, draft: Draft) -> None:
        """Write and commit a draft, then prune; from any thread. StorageError on all, with earlier ones unchanged."""
        self._verified.add(self._folders.commit(draft))
        self._world.on_rank0(self._prune)

    def _prune(self) -> None:
        """Delete all but the ``keep`` newest checkpoints, once two of these (or the only one) are known to be intact.

        Intact are those committed by this process, which are not read back, and those that verify.
        """
        folders = committed(self._folder)
        kept, old = folders[: self._keep], folders[self._keep :]
        if old and self._are_intact(kept, min(2, self._keep)):
            self._folders.remove(old)

    def _are_intact(self, folders: Sequence[Path], least: int) -> bool:
        intact = 0
        for folder in folders:
            if folder in self._verified or not verify(folder):
                self._verified.add(folder)
                intact += 1
            if intact == least:
                return True
        return False


def restore(saved: Checkpoint, state: TrainState) -> Progress:
    """Copy a checkpoint into a state whose module has the saved weights and whose optimizer has taken no step.

    Both hold after a start (``training.build``) and after ``return_to``.

    Optimizer state is converted to any number of ranks and any ZeRO stage (``optimizer_state``). Missing parts start
    anew: an added average of constant rate at the weights, another optimizer without state, another density of
    timesteps without losses. An added power-function average cannot: it needs the whole training history, so it is a
    ConfigError on every rank, as is bitsandbytes' state of another layout that does not record its own.
    """
    saved.require("progress", "config", "ema_rates", "layout", "sliced_state", "has_raw_state", "loss_scale")
    manifest, engine = saved.manifest, state.engine
    progress = Progress(**manifest["progress"])
    if progress.applied:
        _check_widths(saved, state.ema.power_stds)
    for flat in engine.flats:
        for fragment in flat.fragments:
            fragment.write(flat.master, saved.slice("master", fragment))
    if saved.optimizer_steps and manifest["config"]["optim"]["name"] == state.config.optim.name:
        optimizer_state.restore(saved, state)
    for name, averages in state.ema.averages.items():
        kind = f"ema/{name}" if name in saved.averages else "master"
        for flat, average in zip(engine.flats, averages, strict=True):
            if average is not None:
                for fragment in flat.fragments:
                    fragment.write(average, saved.slice(kind, fragment))
    state.meters.restore(saved.meters(state.world.rank, state.world.size))
    state.objective.timesteps.restore(saved.timesteps())
    state.scales.restore(saved.fp8())
    state.guard.spikes.restore(saved.spikes())
    engine.restore(progress.applied, manifest["loss_scale"])
    optimizer_state.check_groups(engine.optimizer, state.config.optim, state.config.steps, progress.applied)
    return progress


def return_to(saved: Checkpoint, state: TrainState) -> Progress:
    """Reset a trained state to a start from ``saved``, bit for bit; called by all ranks. StorageError on all."""
    state.world.on_all_ranks(lambda: state.engine.return_to(partial(saved.slice, "master")))
    return restore(saved, state)


def _check_widths(saved: Checkpoint, wanted: Sequence[float]) -> None:
    added = [str(std) for std in wanted if std not in saved.ema_stds]
    require(
        not added,
        f"{saved.folder} has averages of the stds {list(saved.ema_stds)}; --ema.power_stds {' '.join(added)} would "
        "miss all steps before it. Leave them out, or start a new run in another --output.folder",
    )


def common_manifest(state: TrainState) -> dict[str, Any]:
    """Return the manifest fields that checkpoints and snapshots share."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "progress": asdict(state.progress),
        "world_size": state.world.size,
        "zero_stage": state.engine.stage,
        "engine": state.engine.kind,
        "parameters": state.engine.shapes,
        "ema_rates": list(state.ema.rates),
        "ema_stds": list(state.ema.power_stds),
        **state.metadata,
    }


def _manifest(state: TrainState) -> dict[str, Any]:
    return {**common_manifest(state), **optimizer_state.manifest(state), "loss_scale": state.engine.loss_scale}


def _tensors(state: TrainState) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return this rank's share of a checkpoint and, for the sliced tensors, where each starts in its parameter."""
    flats = state.engine.flats
    kinds: dict[str, Sequence[Tensor | None]] = {"master": [flat.master for flat in flats]}
    kinds |= {f"ema/{name}": averages for name, averages in state.ema.averages.items()}
    for key in optimizer_state.sliced_keys(state):
        kinds[key] = [flat.state[key].view(-1) if key in flat.state else None for flat in flats]
    tensors, starts = sliced(flats, kinds, optimizer_state.sliced_state(state))
    tensors[METERS] = state.meters.sums
    if state.world.is_first:  # the same on every rank
        tensors |= {TIMESTEPS + name: values for name, values in state.objective.timesteps.state().items()}
        tensors |= {FP8 + name: values for name, values in state.scales.state().items()}
        tensors |= {SPIKES + name: values for name, values in state.guard.spikes.state().items()}
    return tensors | dict(optimizer_state.unsliced_state(state)), starts


def sliced(
    flats: Sequence[Flat],
    kinds: Mapping[str, Sequence[Tensor | None]],
    blocks: Mapping[str, Sizes | None] = MappingProxyType({}),
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Slice flat tensors, by kind, into this rank's ``<kind>/<parameter>``; return the slices and their starts.

    Args:
        flats: of this rank.
        kinds: for each kind its values in every flat; None: it has none.
        blocks: for the kinds whose entries are blocks of a parameter, their sizes.
    """
    tensors, starts = {}, {}
    for kind, flat_tensors in kinds.items():
        sizes = blocks.get(kind)
        slices = owned_fragments(flats, flat_tensors) if sizes is None else owned_blocks(flats, flat_tensors, sizes)
        for fragment, values in slices:
            tensors[f"{kind}/{fragment.name}"] = values
            starts[f"{kind}/{fragment.name}"] = fragment.start
    return tensors, starts
