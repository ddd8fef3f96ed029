"""A machine with a GPU and its driver that no torch can use: their files, nvidia-smi on PATH, and a torch for CUDA.

Commands see the files at their places, in a mount namespace of their own. Without the right to mount, fastdiff looks
for them elsewhere. The torch is the installed one that claims a CUDA version and fails as a torch for CUDA does.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.processes import Finished, run
from tests.support.scripts import run_script, run_with_forks

CHANGED = ("torch.version", "torch.cuda", "fastdiff.parallel.unusable_gpu")
"""Modules that a pretended machine changes."""
SITE = """
import importlib.machinery, json, os, sys

given = json.loads(os.environ["PRETENDED"])

def refuse():
    raise RuntimeError(given["failure"])

def change(name, module):
    if name == "torch.version":
        module.cuda = given["cuda"]
    elif name == "torch.cuda":
        module.is_available = lambda: False
        module.init = refuse
    elif name == "fastdiff.parallel.unusable_gpu" and given["root"]:
        module._ROOT = type(module._ROOT)(given["root"])

class Changing:
    def find_spec(self, name, path=None, target=None):
        if name not in ("torch.version", "torch.cuda", "fastdiff.parallel.unusable_gpu"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader
        execute = loader.exec_module
        loader.exec_module = lambda module: (execute(module), change(name, module))
        return spec

sys.meta_path.insert(0, Changing())
"""
PRETENDED = Path(__file__).parent / "pretended.py"
"""A script that runs another one on the machine of its environment."""
_MOUNT = """
set -e
mount -t tmpfs none "$1/mount"
for name in null zero full random urandom tty; do
  touch "$1/mount/$name"
  mount --bind "/dev/$name" "$1/mount/$name"
done
mkdir "$1/mount/shm"
mount --bind /dev/shm "$1/mount/shm"
ln -s /proc/self/fd "$1/mount/fd"
cp -a "$1/dev/." "$1/mount"
mount --move "$1/mount" /dev
mount -t tmpfs none /proc/driver
cp -a "$1/proc/driver/." /proc/driver
shift
exec "$@"
"""
_VERSION = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22-I3)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
_DENIED = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
"""The start of a command that obeys the modes of files also as root."""


@dataclass(frozen=True)
class PretendedGpu:
    """The files of a driver, and what torch says to them."""

    folder: Path
    gpus: int = 2
    driver: str = "580.95.05"
    smi: bool = True
    closed: bool = False
    """Whether the user may not open the device nodes."""
    granted: int | None = None
    """Number of GPUs whose nodes the user may open, as in a Slurm job; None: all, if not ``closed``."""
    pci: bool = True
    """Whether the GPU is on the PCI bus."""
    cuda: str | None = "13.0"
    """CUDA version of torch; None: built without."""
    failure: str = "No CUDA GPUs are available"

    def make(self) -> PretendedGpu:
        """Write the files."""
        for name in ("dev", "mount", "proc/driver", "bin", "site"):
            (self.folder / name).mkdir(parents=True)
        for name in ([f"nvidia{n}" for n in range(self.gpus)] + ["nvidiactl", "nvidia-uvm"]) if self.gpus else []:
            refused = self.granted is not None and name[6:].isdigit() and int(name[6:]) >= self.granted
            (self.folder / "dev" / name).touch(mode=0o000 if self.closed or refused else 0o666)
        if self.pci:
            device = self.folder / "sys/bus/pci/devices/0000:01:00.0"
            device.mkdir(parents=True)
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text("0x030200\n")
        if self.driver:
            version = self.folder / "proc/driver/nvidia/version"
            version.parent.mkdir()
            version.write_text(_VERSION.format(self.driver))
        if self.smi:
            (self.folder / "bin/nvidia-smi").write_text("#!/bin/sh\necho 'started' >> \"$0.log\"\n")
            (self.folder / "bin/nvidia-smi").chmod(0o755)
        (self.folder / "site/sitecustomize.py").write_text(SITE)
        return self

    def prefix(self) -> list[str]:
        """Return the start of a command that sees the files."""
        mounted = ["unshare", "--mount", "bash", "-c", _MOUNT, "-", str(self.folder)] if can_mount() else []
        refused = self.closed or self.granted is not None
        return [*mounted, *(_DENIED if refused and os.getuid() == 0 else ())]

    def environment(self, *, mounted: bool = True, **given: str) -> dict[str, str]:
        """Return the variables of a command on the machine; ``mounted``: it may see the files at their places."""
        root = "" if mounted and can_mount() else str(self.folder)
        return {
            "PRETENDED": json.dumps({"cuda": self.cuda, "failure": self.failure, "root": root}),
            "PYTHONPATH": os.pathsep.join([str(self.folder / "site"), os.environ.get("PYTHONPATH", "")]),
            "PATH": os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]]),
            "CUDA_VISIBLE_DEVICES": "0,1",
            **given,
        }

    def run(self, *command: str | Path, timeout_s: float = 240, **environment: str) -> Finished:
        """Run a command there; nvidia-smi must not be started."""
        done = run([*self.prefix(), *command], timeout_s=timeout_s, **self.environment(**environment))
        self._look_at_smi()
        return done

    def run_script(self, path: Path, *arguments: str | Path, **environment: str) -> Finished:
        """Run a script there in two seconds: fastdiff looks for the files in ``folder``, and all of them open."""
        assert not self.closed
        assert self.granted is None
        done = run_script(PRETENDED, path, *arguments, **self.environment(mounted=False, **environment))
        self._look_at_smi()
        return done

    def run_with_forks(self, path: Path, *arguments: str | Path, **environment: str) -> Finished:
        """Run a script there whose own processes are forks, which see the same machine."""
        done = run_with_forks(PRETENDED, path, *arguments, **self.environment(mounted=False, **environment))
        self._look_at_smi()
        return done

    def _look_at_smi(self) -> None:
        assert not (self.folder / "bin/nvidia-smi.log").exists(), (
            "looking for nvidia-smi costs nothing, starting it does"
        )


@cache
def can_mount() -> bool:
    """Return whether this user may have mounts of its own, and the kernel has the folder of drivers."""
    if not Path("/proc/driver").is_dir():
        return False
    tried = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/proc/driver"]
    return subprocess.run(tried, capture_output=True, timeout=20).returncode == 0
