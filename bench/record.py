"""Where a number comes from, and the file that keeps both."""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fastdiff_kernels import launch

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a measurement depends on besides its case."""

    git: str
    """Commit, with ``-dirty`` if files differ from it; ``unknown`` outside a clone."""
    device: str
    """Name of the GPU, or ``cpu``."""
    driver: str
    """Version of the NVIDIA driver, or ``none``."""
    torch: str
    triton: str
    python: str
    date: str
    """UTC, ISO 8601, to the second."""
    command: str
    """Command line."""

    @classmethod
    def here(cls) -> Fingerprint:
        """That of this process."""
        on_gpu = torch.cuda.is_available()
        return cls(
            git=_output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12") or "unknown",
            device=torch.cuda.get_device_name() if on_gpu else "cpu",
            driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else "none",
            torch=str(torch.__version__),
            triton="none" if launch.triton is None else str(launch.triton.__version__),
            python=sys.version.split()[0],
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=shlex.join(["python", *sys.orig_argv[1:]]),
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if name != "command")


class Log:
    """A file of JSON lines: first the fingerprint, then one record per line, each on disk as soon as it is written."""

    def __init__(self, path: Path | None) -> None:
        """Open ``path``, replacing what it held, in a new folder if need be; None keeps nothing."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = None if path is None else path.open("w", encoding="utf-8")
        self.write({"fingerprint": asdict(Fingerprint.here())})

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()


def _output(*command: str) -> str:
    """First line of what a command prints; empty if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().split("\n")[0]
