"""Record and lock of a run folder: ``run.json`` and ``.lock``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fastdiff import sanitize
from fastdiff.config.deepspeed import DsConfig
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.errors import ConfigError
from fastdiff.files import lock, publish

_PACKAGES = ("fastdiff", "torch", "triton", "deepspeed", "diffusers", "transformers", "peft", "bitsandbytes")


def as_json(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as JSON values, without secrets."""
    return sanitize.tree(json.loads(json.dumps(asdict(config))))  # type: ignore[no-any-return]


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect the numbers."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"python": sys.version.split()[0]}


def claim(folder: Path) -> Callable[[], None]:
    """Create the run folder and lock it for this job; return the function that releases the lock.

    Raises:
        ConfigError: another job holds the lock. The lock ends with its process, so it is never removed by hand.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    file: IO[str] = os.fdopen(descriptor, "a+")
    try:
        lock(file.fileno(), folder)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise ConfigError(
            f"the run folder {folder} is in use by another job ({holder}); wait for it, stop it, "
            "or choose another --output.folder"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file.close


def write_run_json(folder: Path, config: RunConfig, launch: Launch, ds_config: DsConfig, device: str) -> None:
    """Write ``run.json``: configuration, command line, versions, commit and device, without secrets."""
    content = {
        "config": as_json(config),
        "argv": [sanitize.line(argument) for argument in launch.argv],
        "versions": versions(),
        "git": _git_state(),
        "device": device,
        "deepspeed": sanitize.tree(ds_config),
    }
    publish(folder / "run.json", json.dumps(content, indent=2).encode(), durable=False)  # every start writes it


def require_run(folder: Path) -> None:
    """Refuse a folder without a run.

    Raises:
        ConfigError: it has no ``run.json``; the message names the runs beside it.
    """
    if not (folder / "run.json").is_file():
        near = sorted(path.parent.name for path in folder.parent.glob("*/run.json"))
        hint = f"runs there: {', '.join(near)}" if near else "start one with `deepspeed fastdiff/train.py`"
        raise ConfigError(f"{folder}: no run (no run.json); {hint}")


def _git_state() -> str | None:
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
