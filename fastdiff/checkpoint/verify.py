"""``fastdiff verify RUN``: verification of every byte of a run's checkpoints and snapshots."""

import os
from dataclasses import dataclass
from pathlib import Path

from fastdiff.checkpoint.manifest import committed, read_manifest, step_of, verify
from fastdiff.checkpoint.reader import snapshot_folder
from fastdiff.errors import StorageError
from fastdiff.progress_bar import Bar

_LISTINGS = 5
"""Listings of checkpoints that an active run may each prune before they are read."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Result for one checkpoint or snapshot."""

    name: str
    """Readable name: "checkpoint of step 1000"."""
    bytes: int
    """Size according to its manifest."""
    problems: tuple[str, ...]

    def __str__(self) -> str:
        if not self.problems:
            return f"{self.name}: intact, {self.bytes / 2**20:.1f} MiB"
        return "\n  ".join([f"{self.name}: damaged", *self.problems])


@dataclass(frozen=True, slots=True)
class RunReport:
    """Result of `verify_run`, newest first."""

    folder: Path
    checkpoints: tuple[Verified, ...]
    snapshots: tuple[Verified, ...]

    @property
    def ok(self) -> bool:
        """Whether the newest checkpoint and the newest snapshot, if any, are intact."""
        return bool(self.checkpoints) and not any(
            found[0].problems for found in (self.checkpoints, self.snapshots) if found
        )

    def __str__(self) -> str:
        found = [f"{self.folder}:", *map(str, self.checkpoints or ["no checkpoint"]), *map(str, self.snapshots)]
        if any(one.problems for one in self.checkpoints):
            found.append("a resume skips damaged checkpoints; restore them from a copy, or delete them")
        if any(one.problems for one in self.snapshots):
            found.append("another --ema-std uses intact snapshots only; restore the damaged ones from a copy")
        return "\n".join(found)


def is_run(folder: Path) -> bool:
    """Return whether the folder is that of a training run."""
    return (folder / "run.json").exists() or (folder / "checkpoints").is_dir()


def verify_run(folder: str | os.PathLike[str]) -> RunReport:
    """Check the manifest, and the size and sha256 of every file, of all checkpoints and snapshots.

    Nothing is written. An active run may add and prune checkpoints meanwhile; the report omits those that vanish, and
    has newer ones if none else is left.
    """
    folder = Path(folder)
    return RunReport(
        folder,
        tuple(_verify_all(folder / "checkpoints", "checkpoint")),
        tuple(_verify_all(snapshot_folder(folder), "snapshot")),
    )


def _verify_all(folder: Path, what: str) -> list[Verified]:
    """Verify the committed folders, newest first; list them again while all that were found have vanished."""
    seen: set[Path] = set()
    found: list[Verified] = []
    for _ in range(_LISTINGS):
        paths = [path for path in committed(folder) if path not in seen]
        if found or not paths:
            break
        seen.update(paths)
        sizes = [_bytes(path) for path in paths]
        with Bar(f"verify {what}s", sum(sizes) / 2**20, "MiB") as bar:
            for path, size in zip(paths, sizes, strict=True):
                problems = _problems(path)
                if problems is not None:
                    found.append(Verified(f"{what} of step {step_of(path)}", size, problems))
                bar.update(size / 2**20)
    return found


def _problems(folder: Path) -> tuple[str, ...] | None:
    """Return what is wrong with a checkpoint; None if an active run has removed or replaced it meanwhile."""
    before = _identity(folder)
    problems = verify(folder)
    is_there = before is not None and _identity(folder) == before
    return tuple(problems) if is_there else None


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return what tells a folder from another one of the same name; None if it is gone."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _bytes(folder: Path) -> int:
    """Return the total size of a checkpoint's files by its manifest; 0 if the manifest lacks it."""
    try:
        return sum(int(entry["bytes"]) for entry in read_manifest(folder)["files"].values())
    except (StorageError, KeyError, TypeError, ValueError, AttributeError):
        return 0
