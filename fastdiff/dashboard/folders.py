"""The run folders of a page, which come and go while it is open."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.errors import ConfigError

DEFAULT = Path("runs")
_MARKS = ("run.json", ".lock", "metrics.jsonl")
"""Files that mark a run folder: it has one of them from its start on."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Run folders that are named, and folders of runs.

    Args:
        paths: as the user gave them; none: all runs in ``runs``, which need not exist yet.

    Raises:
        ConfigError: a path is no folder.
    """

    paths: Sequence[Path]

    def __post_init__(self) -> None:
        for path in self.paths:
            if not path.is_dir():
                near = sorted(run.name for run in runs_in(path.parent))
                hint = f"runs there: {', '.join(near)}" if near else "start a run with `fastdiff train`"
                raise ConfigError(f"{path}: no folder of a run; {hint}")

    def find(self) -> dict[str, Path]:
        """Return the runs by their keys: those that are named in their order, others newest first.

        A named folder that has meanwhile been deleted stays: the page says so.
        """
        found: list[Path] = []
        for path in self.paths or [DEFAULT]:
            inner = [] if is_run(path) else runs_in(path)
            found += sorted(inner, key=_newest, reverse=True)
            if not inner and self.paths:
                found.append(path)
        return {key_of(path): path for path in found}

    def in_words(self) -> str:
        """Name the folders."""
        return ", ".join(str(path) for path in self.paths) if self.paths else f"all runs in {DEFAULT}/"


def is_run(folder: Path) -> bool:
    """Return whether a run has claimed the folder; one that may not be read counts as none."""
    return any(os.path.isfile(folder / name) for name in _MARKS)


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders in a folder."""
    try:
        inner = list(folder.iterdir())
    except OSError:
        return []
    return [path for path in inner if os.path.isdir(path) and is_run(path)]


def key_of(run: Path) -> str:
    """Return the name of a run in addresses of the page."""
    return hashlib.sha256(str(run.absolute()).encode(errors="surrogateescape")).hexdigest()[:12]


def names_of(runs: dict[str, Path]) -> list[dict[str, Any]]:
    """Return key, name and path of each run; runs of one name are told apart by their folder."""
    names = [path.absolute().name for path in runs.values()]
    found = []
    for key, path in runs.items():
        name = path.absolute().name
        shown = name if names.count(name) == 1 else f"{path.absolute().parent.name}/{name}"
        found.append({"key": key, "name": shown, "path": str(path)})
    return found


def _newest(run: Path) -> float:
    times = []
    for name in _MARKS:
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
