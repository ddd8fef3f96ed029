"""Install fastdiff into .venv, with the exact versions that the NVIDIA driver of this machine can run.

``make`` calls it before anything is installed, so it uses the standard library alone. ``--dev`` also installs what the
tests and the checks need. CUDA=12, CUDA=13 or CUDA=cpu in the environment overrides the choice; it is kept for later
installations, until another is given.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""Index of torch without CUDA, which is 3 GB smaller."""
CAPABILITY = (7, 5)
"""Oldest compute capability that both sets are built for (T4, RTX 20)."""
PYTHONS = ((3, 11), (3, 13))


class Versions(NamedTuple):
    """A set of versions that were tested together."""

    constraints: str
    extra: str
    """Extra of pyproject.toml that belongs to this CUDA."""
    driver: int
    """Oldest major version of the driver: the least of CUDA's minor version compatibility; 0: needs none."""


SETS = {
    "13": Versions("constraints.txt", "cuda13", 580),
    "12": Versions("constraints-cu12.txt", "cuda12", 525),
    "cpu": Versions("constraints.txt", "cuda13", 0),
}
"""By the value of CUDA, the newest first."""
EXTRAS, DEVELOPERS = "all", "docs,dev"
"""Extras of every set; of the tests and the checks, comma-separated."""


class Unfit(Exception):
    """Nothing can be installed that would run here; the message has the remedy."""


def driver_version(root: Path = Path("/")) -> str | None:
    """Return the version of the NVIDIA driver, such as 580.159.03; None: there is none.

    Args:
        root: of the file system with ``proc`` and ``sys``.
    """
    module = root / "proc/driver/nvidia/version"
    for text in (module.read_text() if module.is_file() else "", _nvidia_smi("driver_version")):
        found = re.search(r"\b\d{3,4}\.\d+(\.\d+)*\b", text)
        if found:
            return found[0]
    return None


def capability() -> tuple[int, ...] | None:
    """Return the compute capability of the newest GPU, such as (9, 0); None: nvidia-smi does not tell."""
    found = re.findall(r"^(\d+)\.(\d+)$", _nvidia_smi("compute_cap"), re.MULTILINE)
    return max((tuple(map(int, each)) for each in found), default=None)


def _nvidia_smi(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def gpu_without_driver(root: Path = Path("/")) -> str | None:
    """Return the PCI address of an NVIDIA GPU; None: there is none."""
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):  # display controller
            return device.name
    return None


def choose(root: Path = Path("/")) -> str:
    """Return the key of the newest set that this machine can run.

    Raises:
        Unfit: there is a GPU, and no set runs on it.
    """
    on_purpose = "for a run on the CPU on purpose: CUDA=cpu make"
    driver = driver_version(root)
    if driver is None:
        gpu = gpu_without_driver(root)
        if gpu is not None:
            raise Unfit(f"the NVIDIA GPU {gpu} has no driver; install version 580 or newer. {on_purpose}")
        return "cpu"
    newest = capability()
    if newest is not None and newest < CAPABILITY:
        here, least = (".".join(map(str, each)) for each in (newest, CAPABILITY))
        raise Unfit(f"the GPU has compute capability {here}; torch and Triton need {least} or newer. {on_purpose}")
    for name, versions in SETS.items():
        if int(driver.split(".")[0]) >= versions.driver > 0:
            return name
    least = ", ".join(f"{v.driver} or newer for CUDA {name}" for name, v in SETS.items() if v.driver)
    raise Unfit(f"the NVIDIA driver is {driver}; expected {least}. Update it, or {on_purpose}")


def describe(name: str, root: Path = Path("/")) -> str:
    """Return the choice in words, with a warning if the driver is too old for it."""
    driver, versions = driver_version(root), SETS[name]
    here = f"NVIDIA driver {driver}" if driver else "no NVIDIA driver"
    text = f"{here}: installing for {'the CPU' if name == 'cpu' else f'CUDA {name}'} ({versions.constraints})"
    if driver and int(driver.split(".")[0]) < versions.driver:
        text += f"; warning: CUDA {name} needs driver {versions.driver} or newer"
    return text


def commands(name: str, python: Path, *, developers: bool = False) -> list[list[str]]:
    """Return the commands of pip that install a set into the environment of ``python``."""
    versions = SETS[name]
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    index = ["--extra-index-url", CPU_WHEELS] if name == "cpu" and _reachable("download.pytorch.org") else []
    extras = ",".join([versions.extra, EXTRAS, *([DEVELOPERS] if developers else [])])
    return [[*pip, *index, "torch", "triton"], [*pip, "--editable", f".[{extras}]"]]


def _reachable(host: str) -> bool:
    try:
        socket.create_connection((host, 443), timeout=5).close()
    except OSError:
        return False
    return True


def recorded(environment: Path) -> list[str]:
    """Return the set of an environment, installed or begun, and the value of CUDA if one was given; empty: unknown."""
    files = (environment / name for name in ("cuda", "installed"))
    return next((file.read_text().split() for file in files if file.is_file()), [])


def install(name: str, environment: Path, asked: str = "", *, developers: bool = False) -> None:
    """Make ``environment`` and install a set into it; an environment of another or an unknown set is emptied first.

    Args:
        name: key of the set.
        environment: folder, which may exist.
        asked: value of CUDA, which is kept for later installations.
        developers: also install what the tests and the checks need.
    """
    base = os.path.realpath(sys.executable)  # make finds the Python of .venv first, which may be removed here
    python = environment / "bin" / "python"
    marks = [environment / "installed", *([environment / "developing"] if developers else [])]
    anew = ["--clear"] if environment.is_dir() and recorded(environment)[:1] != [name] else []
    if anew:  # packages of two CUDA versions share folders
        print(f"install.py: {environment} has other versions and is made anew", flush=True)
    for mark in marks:
        mark.unlink(missing_ok=True)
    subprocess.run([base, "-m", "venv", *anew, environment], check=True)
    record = f"{name} {asked}".strip() + "\n"
    (environment / "cuda").write_text(record)  # before pip, whose failure leaves packages of this set
    constraints = {**os.environ, "PIP_CONSTRAINT": SETS[name].constraints}
    for command in commands(name, python, developers=developers):
        subprocess.run(command, check=True, cwd=HERE, env=constraints)
    if name != "cpu":
        _tell_whether_torch_sees_the_gpu(python)
    for mark in marks:
        mark.write_text(record)


def _tell_whether_torch_sees_the_gpu(python: Path) -> None:
    """An image may be built without a GPU; on any other machine a GPU that torch does not see is a mistake."""
    look = "import torch; print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 'no')"
    seen = subprocess.run([python, "-W", "ignore", "-c", look], capture_output=True, text=True, check=False)
    version, _, count = seen.stdout.strip().partition(" ")
    which = f"{count or 'no'} GPU{'' if count == '1' else 's'}"
    print(f"install.py: torch {version} sees {which}; fastdiff doctor tells more")


def check_python() -> None:
    """Refuse a Python that the wheels of the sets are not built for.

    Raises:
        Unfit: it is too old or too new.
    """
    low, high = (".".join(map(str, each)) for each in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        here = f"{sys.executable} is Python {platform.python_version()}"
        raise Unfit(f"{here}; expected {low} to {high}, for example PYTHON=python{high} make")


def main() -> int:
    """Install what fits, or what CUDA names; return the exit code."""
    environment = HERE / ".venv"
    asked = os.environ.get("CUDA") or "".join(recorded(environment)[1:])
    try:
        check_python()
        if asked and asked not in SETS:
            raise Unfit(f"CUDA={asked}: expected {', '.join(SETS)}, or nothing")
        name = asked or choose()
    except Unfit as error:
        print(f"install.py: {error}", file=sys.stderr)
        return 2
    print(f"install.py: {describe(name)}", flush=True)
    try:
        install(name, environment, asked, developers="--dev" in sys.argv[1:])
    except subprocess.CalledProcessError as error:
        print(f"install.py: ended with {error.returncode}: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
