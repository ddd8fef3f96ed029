"""Whether a run may go on from a checkpoint: configuration, data and code are compared with those that are asked for.

No torch is imported: ``fastdiff train`` compares before it starts the ranks.
"""

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from fastdiff.checkpoint.manifest import Manifest, committed, read_manifest, require_fields
from fastdiff.config.command_line.config_file import with_kind
from fastdiff.config.launch_options import Resume
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.objective import DEFAULTS
from fastdiff.errors import ConfigError, StorageError

Metadata = dict[str, Any]
"""``config`` as JSON, ``versions`` with the code of users, and digests: ``dataset`` and ``_OF_LORA``, None: unknown; of
several data sets also ``datasets``, what decides each by its name."""

FREE = (
    "output.",
    "validation.",
    "sampling.",
    "data.path",
    "data.sets",
    "data.autoencoder",
    "data.image_root",
    "data.cache",
    "data.damaged",
    "data.loader",
    "data.prefetch",
    "data.workers",
    "batch.micro",
    "ema.snapshot_every",
    "objective.plugin",
    "divergence.limit",
    "performance.device",
    "performance.engine",
    "performance.cuda_graph",
    "performance.recompute",
    "performance.stored_blocks",
    "performance.profile",
)
"""Fields, or sections that end with a dot, that may differ at a resume: they change nothing, or rounding alone
(``batch.micro``, ``performance.engine``). The code of ``objective.plugin`` is compared by its digest."""
_OF_RESULT = ("plugin.network", "plugin.objective", "plugin.optimizer")
"""Plug-ins that decide the result of a run (``run_record.plugins``)."""
_KEEPS_WEIGHTS = (
    "model.dropout",
    "model.qkv_order",
    "model.routing_share",
    "model.routing_from",
    "model.routing_to",
    "model.path_drop",
    "model.dense_share",
    "model.aligned_block",
    "model.aligned_token",
)
"""Fields of a network that leave the shapes of its weights as they are."""
_OF_LORA: Mapping[Literal["base", "adapter"], str] = {
    "base": "weights that the LoRA is added to",
    "adapter": "file that the LoRA starts from",
}
"""Digests of the files of a LoRA; one that is not known before or now is not compared."""
_MOST = 12
"""Changes that a message lists."""
_SUMS = "performance.grad_accum_dtype"
_OPTIMIZER, _NETWORK = "optim.name", "model.kind"
_OBJECTIVE = {f"objective.{name}": value for name, value in DEFAULTS.items()}


def newest_manifest(run: Path) -> tuple[Path, Manifest] | None:
    """Return the newest committed checkpoint of a run folder whose manifest can be read, and that manifest."""
    for folder in committed(run / "checkpoints"):
        with suppress(StorageError, OSError):  # one that is pruned meanwhile, or damaged: a start tells of it
            return folder, read_manifest(folder)
    return None


def check_resume(run: Path, resume: Resume, *, resumable: bool) -> None:
    """Raise ConfigError if ``--resume`` excludes the state of a run folder; ``resumable``: it has a checkpoint."""
    if resume == "never" and (run / "run.json").exists():
        raise ConfigError(f"--resume never: {run} holds a run; delete it or choose another --output.folder")
    if resume == "must" and not resumable:
        raise ConfigError(f"--resume must: {run} has no checkpoint; use --resume auto to start a new run")


def check_unchanged(
    checkpoint: Path, manifest: Manifest, metadata: Metadata, allowed: Sequence[str], *, fits: bool = True
) -> None:
    """Refuse a run folder whose run has another configuration, data set, code of users or base of a LoRA.

    Args:
        checkpoint: folder of the checkpoint to go on from, ``RUN/checkpoints/step-N``.
        manifest: of the checkpoint.
        metadata: of the run that is asked for.
        allowed: names that may differ (``--allow-change``).
        fits: whether the network takes the data set.

    Raises:
        ConfigError: with what differs; for other data with the state of the run that is there.
    """
    require_fields(checkpoint, manifest, "config", "dataset")
    _check_known(allowed, metadata["config"])
    changes = _changes(manifest, metadata, allowed)
    if not changes:
        return
    run, now = checkpoint.parent.parent, metadata["config"]
    other = f"give --output.folder {os.path.join(run.parent, 'NAME')} for another"
    of_weights = [key for key in changes if key.startswith("model.") and key not in _KEEPS_WEIGHTS]
    acceptable = not of_weights and len(changes) <= _MOST
    accept = " ".join(f"--allow-change {key}" for key in changes)
    if "dataset" in changes:
        there = f"{run} is a run on {_of_data(manifest, now)}{_changed_sets(manifest, metadata)}"
        going_on = f", or go on with it on {_named(now['data'])} by {accept}" if acceptable and fits else ""
        raise ConfigError(f"{there} ({_state(manifest)}); {other}{going_on}")
    diff = "\n".join(f"  --{key}: {change}" for key, change in list(changes.items())[:_MOST])
    more = f"\n  and {len(changes) - _MOST} more" if len(changes) > _MOST else ""
    if _OPTIMIZER in changes:  # whose state no other optimizer takes
        other += f" (from these weights: `fastdiff export {run} OUT`, then --pretrained.weights --pretrained.path)"
        accept += " (its state then starts at zero)"
    ways = ["change it back", other, *([f"accept it with {accept}"] if acceptable else [])]
    raise ConfigError(
        f"the run in {run} ({_state(manifest)}) was started with another configuration:\n{diff}{more}\n"
        f"{', '.join(ways[:-1])}, or {ways[-1]}"
    )


def _changes(manifest: Manifest, metadata: Metadata, allowed: Sequence[str]) -> dict[str, str]:
    changes = config_changes(manifest["config"], metadata["config"], allowed)
    digest = metadata["dataset"]
    if digest is not None and manifest["dataset"] != digest and "dataset" not in allowed:
        changes["dataset"] = f"{manifest['dataset'][:12]} -> {digest[:12]} (digest)"
    for name, what in _OF_LORA.items():
        before, now = manifest.get(name), metadata.get(name)
        if before is not None and now is not None and before != now and name not in allowed:
            changes[name] = f"{before[:12]} -> {now[:12]} (digest of the {what})"
    return changes | _plugin_changes(manifest.get("versions", {}), metadata["versions"], allowed)


def _of_data(manifest: Manifest, now: Mapping[str, Any]) -> str:
    """Return the data set of a run in words: its path, and whether another one lies there now."""
    path = _named(manifest["config"].get("data", {})) or "other data"
    same = os.path.abspath(path) == os.path.abspath(_named(now["data"]))
    return f"{path} as it was before, with other content" if same else path


def _named(data: Mapping[str, Any]) -> str:
    """Return the path of a data set, or the entries of several."""
    return str(data.get("path") or " ".join(data.get("sets") or ()))


def _changed_sets(manifest: Manifest, metadata: Metadata) -> str:
    """Return which of several data sets changed, and how; nothing if the run has or had one alone."""
    saved: dict[str, Any] = manifest.get("datasets") or {}
    now: dict[str, Any] = metadata.get("datasets") or {}
    if not saved or not now:
        return ""
    words = {
        "digest": "other samples",
        "per_epoch": "other share of an epoch",
        "loss_weight": "other weight of its loss",
        "condition_dropout": "other share of dropped conditions",
    }
    found = []
    for name in dict.fromkeys([*saved, *now]):
        if name not in saved or name not in now:
            found.append(f"{name}: {'new' if name not in saved else 'missing'}")
            continue
        differing = [text for field, text in words.items() if saved[name].get(field) != now[name].get(field)]
        found += [f"{name}: {', '.join(differing)}"] if differing else []
    return f", where now {'; '.join(found) or 'the data sets have another order'}"


def _state(manifest: Manifest) -> str:
    """Return how far a run is: ``step 60, done`` or ``step 60 of 100``."""
    config, progress = manifest["config"], manifest.get("progress", {"samples": 0, "steps": 0})
    with suppress(KeyError, TypeError, ZeroDivisionError):
        steps = config["samples"] // config["batch"]["samples"]
        done = progress["samples"] >= config["samples"]
        return f"step {progress['steps']}, done" if done else f"step {progress['steps']} of {steps}"
    return f"step {progress['steps']}"


def _plugin_changes(saved: Mapping[str, str], now: Mapping[str, str], allowed: Sequence[str]) -> dict[str, str]:
    """Return the plug-ins with another code; the folder of a file does not count."""
    return {
        name: f"{saved.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in _OF_RESULT
        if _code(saved.get(name)) != _code(now.get(name)) and name not in allowed
    }


def _code(identified: str | None) -> str | None:
    return None if identified is None else identified.rpartition(":")[2]


def config_changes(saved: dict[str, Any], now: dict[str, Any], allowed: Sequence[str]) -> dict[str, str]:
    """Return the differing fields that make two configurations different runs.

    ``FREE`` and ``allowed`` fields do not count, nor does the length of the run under a constant learning rate.
    """
    free = (*FREE, "samples") if str(now["optim"]["schedule"]).startswith("constant") else FREE
    old, new = _with_fields_of(saved, now, "the checkpoint"), _with_fields_of(now, saved, "the run")
    old[_SUMS] = old.get(_SUMS) or old["performance.precision"]  # runs older than the field added up in their precision
    new[_SUMS] = new.get(_SUMS) or old[_SUMS]
    compared = old.keys() | new.keys()
    for name in (_OPTIMIZER, _NETWORK):  # fields that only one of them has differ with the name
        if old[name] != new[name]:
            section = name.partition(".")[0] + "."
            compared -= {key for key in old.keys() ^ new.keys() if key.startswith(section)}
    return {
        key: f"{json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in sorted(compared)
        if old.get(key) != new.get(key) and key not in allowed and not _is_free(key, free)
    }


def _with_fields_of(config: dict[str, Any], other: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the leaves of a configuration; what only the other one has, or another process, has its default."""
    defaults, wanted = flatten(as_json(with_kind(RunConfig(), config, source))), flatten(other)
    return _OBJECTIVE | {key: value for key, value in defaults.items() if key in wanted} | flatten(config)


def of_result(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration without the ``FREE`` fields and sections, such as paths."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        is_section = isinstance(value, dict)
        name = f"{prefix}{key}{'.' if is_section else ''}"
        if not _is_free(name, FREE):
            found[key] = of_result(value, name) if is_section else value
    return found


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name."""
    flat = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def _is_free(key: str, free: Sequence[str]) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in free)


def _check_known(allowed: Sequence[str], config: dict[str, Any]) -> None:
    known = ["dataset", *_OF_LORA, *_OF_RESULT, *(_OBJECTIVE | flatten(config))]
    for key in allowed:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--allow-change {key}: there is no such field{hint}")
