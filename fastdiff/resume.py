"""Is the run in the folder the one that is asked for?"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdiff.checkpoint import Checkpoints
from fastdiff.config import RunConfig
from fastdiff.config_file import with_kind
from fastdiff.errors import ConfigError
from fastdiff.launch import Launch, as_json
from fastdiff.saved import Saved

Facts = dict[str, Any]

FREE = (
    "output.",
    "validation.",
    "data.path",
    "data.cache",
    "data.damaged",
    "data.loader",
    "data.prefetch",
    "data.workers",
    "batch.micro",
    "ema.snapshot_every",
    "divergence.limit",
    "performance.recompute",
)
"""Fields, or parts that end with a dot, that do not change what is computed, and so may differ at a resume."""


def find(checkpoints: Checkpoints, launch: Launch, facts: Facts, folder: Path) -> Saved | None:
    """Return the checkpoint to continue from, or None for a new run; called by all ranks.

    Raises:
        ConfigError: ``--resume`` forbids what is there, or the run was started with another configuration.
        StorageError: there are checkpoints, and none is intact.
    """
    if launch.resume == "never":
        if (folder / "run.json").exists():
            raise ConfigError(f"--resume never: {folder} holds a run; delete it or choose another --output.folder")
        return None
    saved = checkpoints.newest()
    if saved is None and launch.resume == "must":
        raise ConfigError(f"--resume must: {folder} has no checkpoint; use --resume auto to start a new run")
    if saved is not None:
        check_unchanged(saved, facts, launch.allow_change)
    return saved


def check_unchanged(saved: Saved, facts: Facts, allowed: Sequence[str]) -> None:
    """Raise ConfigError with a diff if the configuration, the data set or the base of a LoRA is not the saved one."""
    _check_known(allowed, facts["config"])
    changes = config_changes(saved.manifest["config"], facts["config"], allowed)
    if saved.manifest["dataset"] != facts["dataset"] and "dataset" not in allowed:
        changes["dataset"] = f"{saved.manifest['dataset'][:12]} -> {facts['dataset'][:12]} (digest)"
    base, now = saved.manifest.get("base"), facts["base"]
    if base is not None and now is not None and base != now and "base" not in allowed:
        changes["base"] = f"{base[:12]} -> {now[:12]} (digest of the weights that the LoRA is added to)"
    if not changes:
        return
    diff = "\n".join(f"  --{key}: {change}" for key, change in changes.items())
    accept = " ".join(f"--allow-change {key}" for key in changes)
    raise ConfigError(
        f"the run in {saved.folder.parent.parent} was started with another configuration:\n{diff}\n"
        f"change it back, choose another --output.folder, or accept it with {accept}"
    )


def config_changes(saved: dict[str, Any], now: dict[str, Any], allowed: Sequence[str]) -> dict[str, str]:
    """Return the fields that differ between two configurations and would make it another run.

    Not ``FREE`` or ``allowed`` ones, nor the length of the run while no learning-rate schedule depends on it.
    """
    free = (*FREE, "samples") if str(now["optim"]["schedule"]).startswith("constant") else FREE
    defaults, new = flatten(as_json(with_kind(RunConfig(), saved))), flatten(now)
    # A field that is newer than the run had its default.
    old = {key: value for key, value in defaults.items() if key in new} | flatten(saved)
    return {
        key: f"{json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in allowed and not _is_free(key, free)
    }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name."""
    flat = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def _is_free(key: str, free: Sequence[str]) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in free)


def _check_known(allowed: Sequence[str], config: dict[str, Any]) -> None:
    known = ["dataset", "base", *flatten(config)]
    for key in allowed:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--allow-change {key}: there is no such field{hint}")
