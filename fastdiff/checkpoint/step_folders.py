"""Folders that survive a kill at any instruction: the commit protocol of checkpoints and snapshots.

``step-N.tmp`` -> every rank writes and fsyncs its file and reports size and sha256, or its error, to all -> rank 0
writes MANIFEST.json, fsyncs, renames the folder to ``step-N`` and fsyncs the parent. A folder counts only if its
manifest and every digest are right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastdiff.checkpoint.manifest import MANIFEST, digest_of
from fastdiff.checkpoint.staging import HostCopy, Share
from fastdiff.errors import StorageError
from fastdiff.files import fsync, make_folders, no_space, write_file
from fastdiff.parallel.world import World

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Draft:
    """What is to be saved, no longer that which the training goes on with."""

    step: int
    share: Share
    """This rank's."""
    manifest: dict[str, Any]
    """The same on all ranks."""


class StepFolders:
    """The ``step-N`` folders under one folder.

    Args:
        folder: where they are.
        world: the ranks; over a process group that no other thread uses while one is committed.
        what: what one holds, for messages: "a checkpoint".
    """

    def __init__(self, folder: Path, world: World, what: str) -> None:
        self._folder = folder
        self._world = world
        self._what = what
        self._copy = HostCopy()

    def draft(
        self,
        world: World,
        step: int,
        tensors: Mapping[str, Tensor],
        starts: Mapping[str, int],
        manifest: dict[str, Any],
        dtype: torch.dtype | None = None,
    ) -> Draft:
        """Copy what ``commit`` will write; called by all ranks. The draft before must be committed, or given up.

        Args:
            world: the ranks; over a process group that no other thread uses meanwhile.
            step: N.
            tensors: this rank's, on any device.
            starts: where a tensor that is a slice starts in what it is a slice of.
            manifest: the same on all ranks.
            dtype: what the tensors are rounded to; None: they stay as they are.

        Raises:
            StorageError: on every rank, if the host of any has no memory for the copy.
        """
        share = world.together(lambda: self._copy.take(tensors, starts, dtype))
        return Draft(step, share, manifest)

    def commit(self, draft: Draft) -> Path:
        """Write and commit ``step-N``; called by all ranks, from any thread.

        Returns:
            The committed folder.

        Raises:
            StorageError: on every rank, if any rank could not write. What is committed already is as it was.
        """
        world, share = self._world, draft.share
        final = self._folder / f"step-{draft.step:08d}"
        temporary = final.with_suffix(".tmp")
        world.on_first(self.drop_leftovers)
        world.on_first(lambda: self._make(temporary))
        self._or_drop(lambda: self._check_space(share.bytes))
        name = f"rank-{world.rank:05d}.safetensors"
        entry = self._or_drop(lambda: world.together(lambda: write_file(temporary / name, share.parts)))
        files = dict(world.gather((name, entry)))
        self._or_drop(lambda: world.on_first(lambda: _publish(temporary, final, draft.manifest | {"files": files})))
        with suppress(StorageError):  # what was in the way; the next commit tries again
            world.on_first(self.drop_leftovers)
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

    def _make(self, temporary: Path) -> None:
        make_folders(self._folder)
        temporary.mkdir()

    def _check_space(self, needed: int) -> None:
        total = sum(self._world.gather(needed))
        free = self._world.on_first(lambda: shutil.disk_usage(self._folder).free)
        if free < total:
            error = no_space(self._folder, self._what, total, free)
            error.everywhere = True
            raise error

    def _or_drop(self, action: Callable[[], T]) -> T:
        """Run ``action``; if it fails, which it does on all ranks, remove what was written."""
        try:
            return action()
        except StorageError:
            with suppress(StorageError):  # the first one is the cause
                self._world.on_first(self.drop_leftovers)
            raise


def _publish(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    manifest = json.loads(json.dumps(manifest))  # as it will be read
    write_file(temporary / MANIFEST, [json.dumps({**manifest, "sha256": digest_of(manifest)}, indent=1).encode()])
    fsync(temporary)
    if final.exists():  # a damaged one of the same step, passed over at the resume
        final.rename(final.with_suffix(".old.tmp"))  # and a whole one, if only its reading had failed
    temporary.rename(final)
    fsync(final.parent)
