"""Fingerprint of a measurement: commit, machine, versions and command line."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import ConfigDict

from fastdiff.version import __version__
from fastdiff_kernels import launch

_ABOVE = Path(__file__).parents[3]
CLONE = _ABOVE if (_ABOVE / "bench" / "gpu.sh").is_file() else None
"""The repository that the benchmarks run from; None: they are installed from a wheel."""
ROOT = CLONE or Path()
"""What ``bench/results`` and ``runs`` are relative to: the repository, otherwise the working folder."""

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Validation of a record line: exactly the fields of its type, and finite numbers."""

_GPU_QUERY = "driver_version,clocks.max.sm,clocks.max.mem,power.limit"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Commit, machine, versions and command line."""

    __pydantic_config__: ClassVar = STRICT

    git: str
    """Commit, with ``-dirty`` if files differ from it; without one the value of FASTDIFF_COMMIT, ``wheel VERSION`` if
    fastdiff is installed from a wheel, or ``unknown``."""
    device: str
    """Name of the GPU, or ``cpu``."""
    cpu: str
    """Name of the processor."""
    cores: int
    """Cores available to this process."""
    memory_gib: float
    driver: str
    """Version of the NVIDIA driver; this and the next three are ``none`` without a GPU."""
    sm_clock: str
    """Highest clock of the multiprocessors."""
    memory_clock: str
    """Highest clock of the memory."""
    power_cap: str
    cuda: str
    """CUDA version of the torch build; ``none`` for a build without CUDA."""
    torch: str
    triton: str
    deepspeed: str
    python: str
    date: str
    """UTC, ISO 8601, to the second."""
    command: str
    """Command line."""
    smoke: bool = False
    """Whether it only shows that the benchmark runs: too few repetitions, on the smallest sizes."""
    load: float | None = None
    """Load average of the minute before, per processor of the machine; None: not recorded."""

    @classmethod
    def here(cls, *, smoke: bool = False) -> Fingerprint:
        """Return the fingerprint of this process, which is about to measure."""
        driver, sm_clock, memory_clock, power_cap = _gpu()
        return cls(
            git=_commit(),
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            driver=driver,
            sm_clock=sm_clock,
            memory_clock=memory_clock,
            power_cap=power_cap,
            cuda=str(torch.version.cuda or "none"),
            torch=str(torch.__version__),
            triton="none" if launch.triton is None else str(launch.triton.__version__),
            deepspeed=_version("deepspeed"),
            python=platform.python_version(),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=_command(),
            smoke=smoke,
            load=round(os.getloadavg()[0] / (os.cpu_count() or 1), 2),
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if name not in ("command", "smoke"))


@functools.cache
def machine() -> str:
    """Return a folder name for this machine: ``nvidia-h200``, ``cpu-2-cores``."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"cpu-{len(os.sched_getaffinity(0))}-cores"


def _commit() -> str:
    if CLONE is None:  # a repository around the working folder is another project
        return os.environ.get("FASTDIFF_COMMIT") or f"wheel {__version__}"
    found = _output("git", "-C", str(CLONE), "describe", "--always", "--dirty", "--abbrev=12")
    return found or os.environ.get("FASTDIFF_COMMIT") or "unknown"


def _command() -> str:
    words = sys.argv[1:]
    return shlex.join(["fastdiff", "bench", *(words[1:] if words[:1] == ["bench"] else words)])


def _gpu() -> tuple[str, str, str, str]:
    if not torch.cuda.is_available():
        return "none", "none", "none", "none"
    cells = _output("nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader").split(", ")
    driver, sm_clock, memory_clock, power_cap = cells if len(cells) == 4 else ["unknown"] * 4
    return driver, sm_clock, memory_clock, power_cap


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().split("\n")[0]
