"""The wheel of the repository, and an environment that has nothing else of it."""

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import BIN, DIE_WITH_TESTS, ROOT, stop

_LAUNCHERS = ("deepspeed", "torchrun")


def build(out: Path, project: Path = ROOT) -> Path:
    """Build the wheel of fastdiff, or of another project such as its kernels alone, into the new folder ``out``."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=120)
    (wheel,) = out.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment with the wheel, and the libraries of the one that runs the tests, without its fastdiff."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        """Create the environment in ``folder``, and beside it a home."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
        self.bin, self.home = folder / "bin", folder.with_name("home")
        self.home.mkdir()
        (packages,) = folder.glob("lib/python*/site-packages")
        # As a path alone: files *.pth in these folders, such as that of an editable fastdiff, are not read.
        (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()))
        install = [*self.pip, "install", "--no-deps", "--no-index", str(wheel)]
        subprocess.run(install, check=True, capture_output=True, timeout=300)
        for name in _LAUNCHERS:
            lines = (BIN / name).read_text().splitlines()
            (self.bin / name).write_text("\n".join([f"#!{self.bin / 'python'}", *lines[1:]]))
            shutil.copymode(BIN / name, self.bin / name)

    @property
    def pip(self) -> list[str]:
        """The command pip of this environment, without its subcommand."""
        return [sys.executable, "-m", "pip", "--isolated", "--python", str(self.bin / "python")]

    def run(self, command: Sequence[str], folder: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command of this environment in a folder, and kill what is left of it.

        Raises:
            subprocess.TimeoutExpired: it took longer than ``limit_s``.
        """
        process = subprocess.Popen(
            [*DIE_WITH_TESTS, *command], cwd=folder, env=self._variables(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit_s)
        finally:
            stop(process)
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def _variables(self) -> dict[str, str]:
        """Return the variables of a process of this environment: none of the tests', no GPU, no network."""
        kept = {name: os.environ[name] for name in ("LANG", "TERM", "TMPDIR") if name in os.environ}
        return kept | {
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
