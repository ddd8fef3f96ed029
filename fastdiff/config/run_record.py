"""Record and lock of a run folder: ``run.json`` and ``.lock``."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from fastdiff import sanitize
from fastdiff.config.deepspeed import DsConfig
from fastdiff.config.launch_options import Launch
from fastdiff.config.networks.user_defined import plugin_of
from fastdiff.config.optimizers.registry import package_of
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError, StorageError
from fastdiff.files import lock, of_other_program
from fastdiff.outputs import require_own_folder
from fastdiff.plugins.user_code import identity_of, names_file
from fastdiff.run_files import read_inside
from fastdiff.version import PACKAGE, __version__

_LEFTOVER = re.compile(r"(run\.json|wandb-id|trackio-id|[a-z]+\.jsonl|step-[0-9]{8,}\.png)\.[0-9]+-[0-9a-f]{8}\.tmp")
"""Temporary names of ``files.publish`` that a killed training leaves; those of other commands may be in use."""
_LARGEST = 1 << 24
"""Bytes of the largest ``run.json`` that is read."""
_OF_RUN = (".lock", "run.json", "checkpoints", "nccl")
"""Entries that mark a run folder: each has at least one; the last exists before the lock."""
_BESIDE = (".err", ".json", ".log", ".out", ".prom", ".sbatch", ".sh", ".toml", ".yaml", ".yml")
"""Endings of the configurations, scripts and logs that users and launchers place in a run folder before the run."""
_PACKAGES = ("torch", "triton", "deepspeed", "diffusers", "transformers", "peft", "bitsandbytes")


def as_json(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as JSON values, without secrets."""
    return sanitize.tree(json.loads(json.dumps(asdict(config))))  # type: ignore[no-any-return]


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect the numbers."""
    of_packages = {name: _version(name) for name in _PACKAGES}
    return {"fastdiff": __version__, **of_packages, "python": sys.version.split()[0]}


@cache
def _version(package: str) -> str:
    """Version of a package; the metadata of all of them together take a tenth of a second to parse."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def plugins(config: RunConfig) -> dict[str, str]:
    """Return the code of users, unexecuted: ``plugin.ROLE`` and ``FILE:NAME sha256 DIGEST``; ConfigError: missing."""
    found, network, objective = {}, plugin_of(config.model.kind), config.objective.plugin
    if network is not None:
        found["plugin.network"] = _identified(network.text, network.identity)
    if (optimizer := package_of(config.optim.name)) is not None:
        found["plugin.optimizer"] = optimizer
    if objective:
        identity = identity_of(objective, "fastdiff.objectives", "--objective.plugin")
        found["plugin.objective"] = _identified(objective, identity)
    for number, callback in enumerate(config.output.callbacks):
        identity = identity_of(callback, "fastdiff.callbacks", "--output.callbacks")
        found[f"plugin.callback.{number}"] = _identified(callback, identity)
    return found


def _identified(text: str, identity: str) -> str:
    return f"{text.rpartition(':')[0]}:{identity}" if names_file(text) else identity


def claim(folder: Path) -> Callable[[], None]:
    """Create the run folder and lock it for this job; return the function that releases the lock.

    Temporary files of a killed job are removed.

    Raises:
        ConfigError: another job holds the lock, which ends with its process, so it is never removed by hand; or the
            folder is of someone else.
    """
    require_run_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        lock(descriptor, folder)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"the run folder {folder} is in use by another job ({holder}); wait for it, stop it, "
            "or choose another --output.folder"
        ) from None
    for leftover in (*folder.glob("*.tmp"), *folder.glob("samples/*.tmp")):
        if _LEFTOVER.fullmatch(leftover.name):
            leftover.unlink(missing_ok=True)
    with suppress(OSError):  # a full disk; the text only names the holder to another job
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode())
    return partial(os.close, descriptor)


def require_run_folder(folder: Path) -> None:
    """Refuse a folder for a new run that is of someone else, by its entries; configurations and logs may lie there.

    Raises:
        ConfigError: it holds others and no run.
        OSError: it cannot be listed.
    """
    require_own_folder("--output.folder", folder, _OF_RUN.__contains__, _is_beside)


def _is_beside(name: str) -> bool:
    return of_other_program(name) or name.endswith(_BESIDE)


def run_json(config: RunConfig, launch: Launch, ds_config: DsConfig, device: str, metadata: Mapping[str, Any]) -> bytes:
    """Return the content of ``run.json``: configuration, command line, versions, commit and device, without secrets.

    ``metadata`` has the versions, the names of the classes that the network learns in the order of their numbers, and
    the digest of the file that a LoRA starts from.
    """
    content = {
        "config": as_json(config),
        "class_names": metadata["class_names"],
        "argv": [sanitize.argument(argument) for argument in launch.argv],
        **({"adapter": metadata["adapter"]} if metadata.get("adapter") else {}),
        "versions": metadata["versions"],
        "git": _git_state(),
        "device": device,
        "deepspeed": sanitize.tree(ds_config),
    }
    return json.dumps(content, indent=2).encode()


def require_run(folder: Path) -> None:
    """Raise ConfigError, with the names of the runs beside it, for a folder without ``run.json``."""
    if not os.path.lexists(folder / "run.json"):
        near = sorted(path.parent.name for path in folder.parent.glob("*/run.json"))
        hint = f"runs there: {', '.join(near)}" if near else "start one with `fastdiff train`"
        raise ConfigError(f"{folder}: no run (no run.json); {hint}")


def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of ``run.json``.

    Raises:
        ConfigError: the folder has no run.
        StorageError: the file cannot be read, or is damaged.
    """
    require_run(folder)
    path = folder / "run.json"
    try:
        found = json.loads(read_inside(folder, "run.json", _LARGEST))
        if not isinstance(found["config"], dict):
            raise TypeError("config is no object")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{path}: not a record of a run ({error}); the next start writes it again") from None
    return dict(found)


def _git_state() -> str | None:
    if not (PACKAGE.parent / ".git").exists():  # of a wheel: a repository around the environment is another project
        return None
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
