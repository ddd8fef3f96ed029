"""Folders that survive a kill at any instruction: the commit protocol of checkpoints and snapshots.

``step-N.tmp`` -> every rank writes and fsyncs its file and reports size and sha256, or its error, to all -> rank 0
writes MANIFEST.json, fsyncs, renames the folder to ``step-N`` and fsyncs the parent. A folder counts only if its
manifest and every digest are right.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fastdiff.dist import World, attempt
from fastdiff.errors import StorageError
from fastdiff.saved import MANIFEST, file_digest


class StepFolders:
    """The ``step-N`` folders under one folder.

    Args:
        folder: where they are.
        world: the ranks.
        what: what one holds, for messages: "a checkpoint".
    """

    def __init__(self, folder: Path, world: World, what: str) -> None:
        self._folder = folder
        self._world = world
        self._what = what

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        starts: Mapping[str, int],
        manifest: dict[str, Any],
        dtype: torch.dtype | None = None,
    ) -> Path:
        """Write and commit ``step-N``; called by all ranks.

        Args:
            step: N.
            tensors: this rank's, on any device.
            starts: where a tensor that is a slice starts in what it is a slice of.
            manifest: the same on all ranks.
            dtype: what the tensors are rounded to; None: they stay as they are.

        Returns:
            The committed folder.

        Raises:
            StorageError: on every rank, if any rank could not write. What is committed already is as it was.
        """
        final = self._folder / f"step-{step:08d}"
        temporary = final.with_suffix(".tmp")
        self._world.on_first(self.drop_leftovers)
        self._world.on_first(lambda: temporary.mkdir(parents=True))
        self._check_space(sum(t.numel() * (dtype or t.dtype).itemsize for t in tensors.values()))
        name = f"rank-{self._world.rank:05d}.safetensors"
        entry, error = attempt(lambda: _write(temporary / name, tensors, starts, dtype))
        files = dict(self._world.gather((name, entry)))
        self._or_drop(lambda: self._world.agree(error))
        self._or_drop(lambda: self._world.on_first(lambda: _commit(temporary, final, manifest | {"files": files})))
        return final

    def remove(self, folders: Iterable[Path]) -> None:
        """Delete committed folders; on rank 0."""
        self.drop_leftovers()
        for folder in folders:
            folder.rename(folder.with_suffix(".tmp"))  # a kill half-way leaves nothing that looks whole
        self.drop_leftovers()

    def drop_leftovers(self) -> None:
        """Remove what a kill, a failed write or a half-done removal left, none of which counts; on rank 0."""
        for leftover in self._folder.glob("step-*.tmp"):
            shutil.rmtree(leftover)

    def _check_space(self, needed: int) -> None:
        total = sum(self._world.gather(needed))
        free = self._world.on_first(lambda: shutil.disk_usage(self._folder).free)
        if free < total:
            self._world.on_first(self.drop_leftovers)
            raise StorageError(
                f"no space on {self._folder}: {self._what} needs {total / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are "
                "free; the earlier checkpoints are intact: free some space and start the same command again",
                everywhere=True,
            )

    def _or_drop(self, action: Callable[[], None]) -> None:
        """Run ``action``; if it fails, which it does on all ranks, remove what was written."""
        try:
            action()
        except StorageError:
            self._world.on_first(self.drop_leftovers)
            raise


def _write(
    path: Path, tensors: Mapping[str, Tensor], starts: Mapping[str, int], dtype: torch.dtype | None
) -> dict[str, Any]:
    """Write one rank's file to the disk itself; return its manifest entry."""
    # Views of one buffer: safetensors wants each tensor to own its memory.
    copies = {
        key: value.detach().to("cpu", dtype or value.dtype, copy=True).contiguous() for key, value in tensors.items()
    }
    try:
        save_file(copies, path, metadata={"starts": json.dumps(starts)})
    except SafetensorError as error:
        free = shutil.disk_usage(path.parent).free
        raise StorageError(f"{path}: could not be written, {free / 2**20:.1f} MiB are free ({error})") from None
    fsync(path)
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def _commit(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    path = temporary / MANIFEST
    path.write_text(json.dumps(manifest, indent=1))
    fsync(path)
    fsync(temporary)
    if final.exists():  # a damaged one of the same step, passed over at the resume
        shutil.rmtree(final)
    temporary.rename(final)
    fsync(final.parent)


def fsync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
