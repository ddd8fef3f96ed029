"""Checkpoints that survive a kill at any instruction: the commit protocol of a run folder.

``step-N.tmp`` -> every rank writes and fsyncs its file and reports size and sha256, or its error, to all -> rank 0
writes MANIFEST.json, fsyncs, renames the folder to ``step-N`` and fsyncs the parent -> only then old ones are pruned.
A checkpoint counts only if its manifest and every digest are right; there is no ``latest`` file to go stale.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from fastdiff.dist import World, attempt
from fastdiff.ema import Ema
from fastdiff.engine import Engine
from fastdiff.errors import ConfigError, StorageError
from fastdiff.fragments import Flat, layout_digest, owned_fragments
from fastdiff.optim import step_count
from fastdiff.progress import Progress
from fastdiff.saved import FORMAT, MANIFEST, VERSION, Saved, committed, file_digest, problem_of, read_manifest


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: ``runs/NAME/checkpoints``.
        keep: how many to keep; never fewer than two verified ones remain.
        world: the ranks; every method is called by all of them.
    """

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self._folder = folder
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
            problems = self._problems(folder)
            if not problems:
                return Saved(folder)
            damage += problems
            if self._world.is_first:
                tqdm.write(f"warning: passing over a damaged checkpoint: {problems[0]}")
        if damage:
            raise _everywhere(
                StorageError(
                    f"none of the {len(folders)} checkpoints in {self._folder} is intact ({damage[0]}); restore one "
                    "from a copy, or start again with another --output.folder"
                )
            )
        return None

    def save(self, progress: Progress, engine: Engine, ema: Ema, facts: dict[str, Any]) -> Path:
        """Write and commit the state after ``progress.steps`` steps, then prune; return the folder.

        Args:
            progress: the clock.
            engine: holds weights, optimizer state and loss scale.
            ema: the averages.
            facts: what else the manifest records: ``config``, ``dataset`` digest, ``versions``.

        Raises:
            StorageError: on every rank, if any rank could not write. Earlier checkpoints are as they were.
        """
        final = self._folder / f"step-{progress.steps:08d}"
        temporary = final.with_suffix(".tmp")
        self._world.on_first(lambda: self._clear(temporary))
        tensors, starts = _tensors(engine.flats, ema)
        self._check_space(sum(t.numel() * t.element_size() for t in tensors.values()))
        name = f"rank-{self._world.rank:05d}.safetensors"
        entry, error = attempt(lambda: _write(temporary / name, tensors, starts))
        outcomes = self._world.gather((name, entry, error))
        if any(error for _, _, error in outcomes):
            self._world.on_first(lambda: shutil.rmtree(temporary, ignore_errors=True))
        self._world.agree(error)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "progress": {"samples": progress.samples, "steps": progress.steps, "skipped": progress.skipped},
            "world_size": self._world.size,
            "zero_stage": engine.stage,
            "layout": layout_digest(self._world, engine.flats),
            "parameters": engine.shapes,
            "sliced_state": _sliced_keys(engine.flats),
            "loss_scale": engine.loss_scale,
            "ema_rates": list(ema.rates),
            "files": {name: entry for name, entry, _ in outcomes},
            **facts,
        }
        self._world.on_first(lambda: _commit(temporary, final, manifest))
        self._verified.add(final)
        self._world.on_first(self._prune)
        return final

    def restore(self, saved: Saved, engine: Engine, ema: Ema, optimizer: str) -> Progress:
        """Copy a checkpoint into a freshly built engine, whose module already has the saved weights.

        Sliceable state goes to any number of ranks and any ZeRO stage; 8-bit blocks only to the same layout.
        """
        manifest = saved.manifest
        progress = Progress(**manifest["progress"])
        same_layout = layout_digest(self._world, engine.flats) == manifest["layout"]
        for index, flat in enumerate(engine.flats):
            for fragment in flat.fragments:
                fragment.of(flat.master).copy_(saved.slice("master", fragment))
            flat.states[flat.key] = _restored_state(saved, flat, index, self._world.rank, same_layout)
            flat.states[flat.key]["step"] = step_count(optimizer, progress.applied)
        for rate, averages in ema.averages.items():
            for flat, average in zip(engine.flats, averages, strict=True):
                if average is not None:
                    for fragment in flat.fragments:
                        fragment.of(average).copy_(saved.slice(f"ema/{rate}", fragment))
        engine.restore(progress.applied, manifest["loss_scale"])
        return progress

    def _problems(self, folder: Path) -> list[str]:
        """Verify ``folder``, each rank a share of the files; return all ranks' findings on every rank."""
        manifest, error = attempt(lambda: read_manifest(folder))
        found = [str(error)] if error else []
        if manifest is not None:
            files = sorted(manifest["files"].items())[self._world.rank :: self._world.size]
            found = [p for name, entry in files if (p := problem_of(folder / name, entry)) is not None]
        problems = [p for share in self._world.gather(found) for p in share]
        if not problems:
            self._verified.add(folder)
        return problems

    def _clear(self, temporary: Path) -> None:
        for leftover in self._folder.glob("step-*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)

    def _check_space(self, needed: int) -> None:
        total = sum(self._world.gather(needed))
        free = self._world.on_first(lambda: shutil.disk_usage(self._folder).free)
        if free < total:
            self._world.on_first(lambda: self._drop_temporary())
            raise _everywhere(
                StorageError(
                    f"no space on {self._folder}: a checkpoint needs {total / 2**20:.1f} MiB, {free / 2**20:.1f} MiB "
                    "are free; the earlier checkpoints are intact: free some space and start the same command again"
                )
            )

    def _drop_temporary(self) -> None:
        for leftover in self._folder.glob("step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _prune(self) -> None:
        """Delete what is older than the ``keep`` newest, once two of the kept ones are known to be intact."""
        folders = committed(self._folder)
        kept, old = folders[: self._keep], folders[self._keep :]
        if old and sum(self._is_intact(folder) for folder in kept) >= 2:
            for folder in old:
                (folder / MANIFEST).unlink()  # first, so that a kill half-way leaves no checkpoint that looks whole
                shutil.rmtree(folder)

    def _is_intact(self, folder: Path) -> bool:
        if folder not in self._verified:
            manifest, _ = attempt(lambda: read_manifest(folder))
            if manifest is None or any(problem_of(folder / n, e) for n, e in manifest["files"].items()):
                return False
            self._verified.add(folder)
        return True


def config_changes(saved: dict[str, Any], now: dict[str, Any], allowed: Sequence[str]) -> list[str]:
    """Return the differences between two configurations that would make it another run, one line each.

    What does not change the numbers may differ: ``output.*``, where and how the data is read, ``batch.micro``, and the
    length of the run while no learning-rate schedule depends on it. ``allowed`` names further keys.
    """
    free = ["output.", "data.path", "data.loader", "data.prefetch", "batch.micro"]
    if str(now["optim"]["schedule"]).startswith("constant"):
        free.append("samples")
    old, new = _flatten(saved), _flatten(now)
    return [
        f"  --{key}: {json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in allowed and not any(key.startswith(f) for f in free)
    ]


def check_unchanged(saved: Saved, facts: dict[str, Any], allowed: Sequence[str]) -> None:
    """Raise ConfigError with a diff if the configuration or the data set is not the saved one."""
    changes = config_changes(saved.manifest["config"], facts["config"], allowed)
    if saved.manifest["dataset"] != facts["dataset"] and "dataset" not in allowed:
        changes.append(f"  dataset: {saved.manifest['dataset'][:12]} -> {facts['dataset'][:12]} (digest)")
    if changes:
        keys = " ".join(f"--allow-change {line.split(':')[0].strip(' -')}" for line in changes)
        raise ConfigError(
            f"the run in {saved.folder.parent.parent} was started with another configuration:\n"
            + "\n".join(changes)
            + f"\nchange it back, choose another --output.folder, or accept it with {keys}"
        )


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def _everywhere(error: StorageError) -> StorageError:
    error.everywhere = True
    return error


def _is_sliceable(value: Any, flat: Flat) -> bool:
    return isinstance(value, Tensor) and value.numel() == flat.master.numel() and value.is_floating_point()


def _sliced_keys(flats: Sequence[Flat]) -> list[str]:
    return sorted({key for flat in flats for key, value in flat.state.items() if _is_sliceable(value, flat)} - {"step"})


def _tensors(flats: Sequence[Flat], ema: Ema) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return this rank's share of a checkpoint and, for the sliced tensors, where each starts in its parameter."""
    kinds: dict[str, Sequence[Tensor | None]] = {"master": [flat.master for flat in flats]}
    kinds |= {f"ema/{rate}": averages for rate, averages in ema.averages.items()}
    for key in _sliced_keys(flats):
        kinds[key] = [flat.state[key].view(-1) if _is_sliceable(flat.state.get(key), flat) else None for flat in flats]
    tensors, starts = {}, {}
    for kind, flat_tensors in kinds.items():
        for fragment, values in owned_fragments(flats, flat_tensors):
            tensors[f"{kind}/{fragment.name}"] = values
            starts[f"{kind}/{fragment.name}"] = fragment.start
    for index, flat in enumerate(flats):
        for key, value in flat.state.items() if flat.owned else ():
            if key != "step" and isinstance(value, Tensor) and not _is_sliceable(value, flat):
                tensors[f"raw/{index}/{key}"] = value
    return tensors, starts


def _restored_state(saved: Saved, flat: Flat, index: int, rank: int, same_layout: bool) -> dict[str, Any]:
    raw = saved.raw(index, rank)
    if raw and not same_layout:
        raise ConfigError(
            f"{saved.folder} holds 8-bit optimizer state of {saved.manifest['world_size']} ranks at ZeRO stage "
            f"{saved.manifest['zero_stage']}, and its blocks cannot be cut anew; resume with the same ranks and stage"
        )
    state: dict[str, Any] = {key: value.to(flat.key.device) for key, value in raw.items()}
    for key in saved.manifest["sliced_state"]:
        if key not in state:
            whole = torch.zeros_like(flat.key, requires_grad=False)
            for fragment in flat.fragments:
                fragment.of(whole.view(-1)).copy_(saved.slice(key, fragment))
            state[key] = whole
    return state


def _write(path: Path, tensors: dict[str, Tensor], starts: dict[str, int]) -> dict[str, Any]:
    """Write one rank's file to the disk itself; return its manifest entry."""
    # Views of one buffer: safetensors wants each tensor to own its memory.
    copies = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in tensors.items()}
    try:
        save_file(copies, path, metadata={"starts": json.dumps(starts)})
    except SafetensorError as error:
        free = shutil.disk_usage(path.parent).free
        raise StorageError(f"{path}: could not be written, {free / 2**20:.1f} MiB are free ({error})") from None
    _fsync(path)
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def _commit(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    path = temporary / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    _fsync(path)
    _fsync(temporary)
    if final.exists():  # a damaged one of the same step, passed over at the resume
        shutil.rmtree(final)
    temporary.rename(final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
