"""Commit protocol of checkpoints and snapshots: folders that survive a kill at any instruction.

``step-N.tmp`` -> every rank writes and fsyncs its file and reports size and sha256, or its error, to all -> rank 0
writes MANIFEST.json, fsyncs, renames the folder to ``step-N`` and fsyncs the parent. A folder is valid only if its
manifest and every digest are correct.
"""

import json
import math
import os
import re
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
from fastdiff.files import fsync, make_folders, no_space, remove, write_file
from fastdiff.parallel.world import World

T = TypeVar("T")
_LEFTOVER = re.compile(r"step-[0-9]+(\.old)?\.tmp")


@dataclass(frozen=True, slots=True)
class Draft:
    """A host copy of the state, detached from the running training."""

    step: int
    share: Share
    """Data of this rank."""
    manifest: dict[str, Any]
    """Identical on all ranks."""


class StepFolders:
    """The ``step-N`` folders under one folder.

    Args:
        folder: their parent folder.
        world: the ranks; no other thread may use their process group during a commit.
        what: content of a folder, for messages: "a checkpoint".
        pinned_gib: limit of the pinned memory of the copy.
    """

    def __init__(self, folder: Path, world: World, what: str, pinned_gib: float = math.inf) -> None:
        self._folder = folder
        self._world = world
        self._what = what
        self._copy = HostCopy(pinned_gib)

    def draft(
        self,
        world: World,
        step: int,
        tensors: Mapping[str, Tensor],
        starts: Mapping[str, int],
        manifest: dict[str, Any],
        dtype: torch.dtype | None = None,
    ) -> Draft:
        """Copy the state for ``commit``; called by all ranks. This overwrites the previous draft.

        Args:
            world: the ranks; no other thread may use their process group meanwhile.
            step: N.
            tensors: of this rank, on any device.
            starts: start of each slice in its flattened parameter.
            manifest: identical on all ranks.
            dtype: target of the rounding; None: no rounding.

        Raises:
            StorageError: on every rank, if the host of any rank has no memory for the copy.
        """
        share = world.on_all_ranks(lambda: self._copy.take(tensors, starts, dtype))
        return Draft(step, share, manifest)

    def commit(self, draft: Draft) -> Path:
        """Write and commit ``step-N``; called by all ranks, from any thread.

        StorageError on every rank: one could not write; committed folders are unchanged.
        """
        world, share = self._world, draft.share
        final = self._folder / f"step-{draft.step:08d}"
        temporary = final.with_suffix(".tmp")
        world.on_rank0(self.drop_leftovers)
        world.on_rank0(lambda: self._make(temporary))
        self._or_drop(lambda: self._check_space(share.bytes))
        name = f"rank-{world.rank:05d}.safetensors"
        entry = self._or_drop(lambda: world.on_all_ranks(lambda: write_file(temporary / name, share.parts)))
        files = dict(world.gather((name, entry)))
        self._or_drop(lambda: world.on_rank0(lambda: _publish(temporary, final, draft.manifest | {"files": files})))
        with suppress(StorageError):  # leftovers of a replaced folder; the next commit tries again
            world.on_rank0(self.drop_leftovers)
        return final

    def remove(self, folders: Iterable[Path]) -> None:
        """Delete committed folders; called on rank 0."""
        self.drop_leftovers()
        for folder in folders:
            folder.rename(folder.with_suffix(".tmp"))  # a kill during the removal leaves no folder that looks complete
        self.drop_leftovers()

    def drop_leftovers(self) -> None:
        """Remove uncommitted leftovers of a kill, a failed write or a partial removal; called on rank 0."""
        for leftover in self._folder.glob("step-*.tmp"):
            if _LEFTOVER.fullmatch(leftover.name):
                remove(leftover)

    def _make(self, temporary: Path) -> None:
        make_folders(self._folder)
        temporary.mkdir()

    def _check_space(self, needed: int) -> None:
        total = sum(self._world.gather(needed))
        free = self._world.on_rank0(lambda: shutil.disk_usage(self._folder).free)
        if free < total:
            error = no_space(self._folder, self._what, total, free)
            error.everywhere = True
            raise error

    def _or_drop(self, action: Callable[[], T]) -> T:
        """Run ``action``; if it fails, which it does on all ranks, remove the written files."""
        try:
            return action()
        except StorageError:
            with suppress(StorageError):  # the first error is the cause
                self._world.on_rank0(self.drop_leftovers)
            raise


def _publish(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    manifest = json.loads(json.dumps(manifest))  # normalize to its form after reading
    write_file(temporary / MANIFEST, [json.dumps({**manifest, "sha256": digest_of(manifest)}, indent=1).encode()])
    fsync(temporary)
    if os.path.lexists(final):  # a damaged folder of the same step, skipped by the resume
        final.rename(final.with_suffix(".old.tmp"))  # or an intact one that was unreadable for a time
    temporary.rename(final)
    fsync(final.parent)
