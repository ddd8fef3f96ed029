"""An NVIDIA GPU that is present and that torch cannot use: whether there is one, and why not.

A run that continued on the CPU there would take hundreds of times as long, and nothing would say so.
"""

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fastdiff.optional_packages import CUDA_VERSIONS, pip_install_for_cuda

_ROOT = Path("/")
_DRIVERS = {13: (580, 65), 12: (525, 60)}
"""The oldest driver of each CUDA version; a driver runs every minor version of the CUDA versions that it knows."""
_TOO_OLD = re.compile(r"driver .* too old \(found version (\d+)\)", re.DOTALL)
"""Matches torch's own message, which has the newest CUDA version that the driver knows: 12080 is 12.8."""
_ON_PURPOSE = (  # DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES=0,1,... also where it was empty
    "to use the CPU on purpose, train with --performance.device cpu; for any other command set CUDA_VISIBLE_DEVICES= "
    "(empty)"
)


@dataclass(frozen=True, slots=True)
class Traces:
    """What an NVIDIA driver leaves on a machine."""

    nodes: tuple[Path, ...] = ()
    """Device nodes of GPUs: /dev/nvidia0, ...; /dev/dxg under Windows. Only those that open, if any does: a job that
    was given one GPU of eight sees the nodes of all."""
    closed: tuple[str, ...] = ()
    """Device nodes that this user may not open; of GPUs only if none opens."""
    has_uvm: bool = True
    """Whether /dev/nvidia-uvm is there, or not needed (under Windows)."""
    driver: str = ""
    """Version of the loaded driver, for example 570.124.06; empty: unknown."""
    uuids: tuple[str, ...] = ()
    smi: str = ""
    """Path of nvidia-smi; empty: not on PATH."""
    pci: bool = False
    """Whether an NVIDIA display controller is on the PCI bus."""

    def tell_of_gpu(self, *, required: bool = False) -> bool:
        """Return whether they prove a GPU for this process.

        A login node has nvidia-smi without a GPU. A container without GPUs shows the driver and the PCI bus of its
        host; there a driver without nvidia-smi counts only if the user has asked for a GPU (``required``).
        """
        return bool(self.nodes or (self.driver and (self.smi or required)) or (self.smi and self.pci))


def unusable_gpu(*, required: bool = False) -> str | None:
    """Return why torch cannot use the GPU of this machine, with the remedy; None if there is no GPU.

    Call it only where ``torch.cuda.is_available()`` is False. It starts no process. GPUs that CUDA_VISIBLE_DEVICES
    hides on purpose do not count.

    Args:
        required: the user has asked for a GPU; then a loaded driver alone is reason enough to expect one.
    """
    if gpus_are_hidden():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = traces(_ROOT)
    if not found.tell_of_gpu(required=required):
        return None
    return f"this machine has an NVIDIA GPU that torch cannot use: {_cause(found, visible)}; {_ON_PURPOSE}"


def gpus_are_hidden() -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs on purpose: its first entry is empty or -1."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.split(",")[0].strip() in ("", "-1")


def traces(root: Path) -> Traces:
    """Look for the driver's files below ``root``, and for nvidia-smi on PATH."""
    smi = shutil.which("nvidia-smi") or ""
    nodes = sorted(path for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdigit())
    windows = [root / "dev/dxg"] if smi and (root / "dev/dxg").exists() else []
    nodes += windows
    nodes = [node for node in nodes if _opens(node)] or nodes
    uvm = root / "dev/nvidia-uvm"
    closed = [node for node in (*nodes, root / "dev/nvidiactl", uvm) if node.exists() and not _opens(node)]
    gpus = (root / "proc/driver/nvidia/gpus").glob("*/information")
    version = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _text(root / "proc/driver/nvidia/version"))
    return Traces(
        nodes=tuple(nodes),
        closed=tuple(f"/{node.relative_to(root)}" for node in closed),
        has_uvm=uvm.exists() or bool(windows),
        driver=version[1] if version else "",
        uuids=tuple(found[1] for path in gpus if (found := re.search(r"GPU UUID:\s*(\S+)", _text(path)))),
        smi=smi,
        pci=any(_is_display(device) for device in (root / "sys/bus/pci/devices").glob("*")),
    )


def _is_display(device: Path) -> bool:
    """Return whether a PCI device is a display controller of NVIDIA."""
    return _text(device / "vendor").strip() == "0x10de" and _text(device / "class").startswith("0x03")


def _cause(found: Traces, visible: str | None) -> str:
    cuda = torch.version.cuda
    return cause(found, cuda, visible, "" if cuda is None else _failure())


def cause(found: Traces, cuda: str | None, visible: str | None, failure: str) -> str:
    """Return the cause and the remedy in words, a function of its arguments.

    Args:
        found: of a machine with a GPU.
        cuda: CUDA version of torch; None: built without CUDA.
        visible: value of CUDA_VISIBLE_DEVICES, which does not hide all GPUs on purpose; None: not set.
        failure: torch's own message.
    """
    if cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA; {_with_cuda(found.driver)}"
    if not found.nodes:
        return _without_nodes(found)
    if _is_older(found.driver, cuda) or _TOO_OLD.search(failure):
        return _too_old(found.driver, cuda, failure)
    if found.closed:
        return (
            f"this user may not open {', '.join(found.closed)}; join the group that owns it (ls -l /dev/nvidia*), or "
            "request the GPU from the scheduler"
        )
    if visible is not None and (missing := _missing(visible, len(found.nodes), found.uuids)):
        return missing
    return f"{failure or 'torch finds none'}; {_last_remedy(found, failure)}"


def _last_remedy(found: Traces, failure: str) -> str:
    if "Error 802" in failure:
        return "with NVSwitch the Fabric Manager must run: systemctl enable --now nvidia-fabricmanager"
    if not found.has_uvm:
        return "there is no device node /dev/nvidia-uvm: run `nvidia-modprobe -u` as root"
    return (
        "`nvidia-smi -L` must list it, and an instance of it if MIG is on: if not, restart the machine or reinstall "
        "the driver"
    )


def _without_nodes(found: Traces) -> str:
    inside = "start a container with --gpus all (Kubernetes: with a limit of nvidia.com/gpu)"
    if found.driver:
        return f"driver {found.driver} is loaded, and there is no device node /dev/nvidia0; {inside}"
    return (
        "it is on the PCI bus, and no driver is loaded and no device node /dev/nvidia0; load the driver (after its "
        f"update: restart the machine), or {inside}"
    )


def _is_older(driver: str, cuda: str) -> bool:
    """Return whether a known driver is older than a known CUDA version needs."""
    least = _DRIVERS.get(_major(cuda))
    return bool(driver) and least is not None and _numbers(driver) < least


def _too_old(driver: str, cuda: str, failure: str) -> str:
    needs = f", which needs {_least(_major(cuda))} or newer" if _major(cuda) in _DRIVERS else ""
    told = _TOO_OLD.search(failure)
    fitting = _newest_cuda(driver) if driver else int(told[1]) // 1000 if told else None
    other = f", or {_install(fitting)}" if fitting in CUDA_VERSIONS and fitting != _major(cuda) else ""
    return f"its driver {driver or 'version'} is older than CUDA {cuda} of this torch{needs}; update the driver{other}"


def _with_cuda(driver: str) -> str:
    """Say how to install a torch with CUDA that a driver runs; an unknown driver is taken for a new one."""
    newest = max(_DRIVERS)
    if fitting := _newest_cuda(driver) if driver else newest:
        return _install(fitting)
    return f"its driver {driver} is too old as well: update it to {_least(newest)} or newer, then {_install(newest)}"


def _install(cuda: int) -> str:
    return f"install for CUDA {cuda}: `CUDA={cuda} make` in a clone, or `{pip_install_for_cuda(cuda)}`"


def _newest_cuda(driver: str) -> int | None:
    """Return the newest CUDA version that a driver runs; None: the driver is unknown, or older than all."""
    return next((cuda for cuda, least in _DRIVERS.items() if driver and _numbers(driver) >= least), None)


def _least(cuda: int) -> str:
    return ".".join(map(str, _DRIVERS[cuda]))


def _major(cuda: str) -> int:
    return int(cuda.partition(".")[0])


def _numbers(driver: str) -> tuple[int, int]:
    major, minor = driver.split(".")[:2]
    return int(major), int(minor)


def _missing(visible: str, gpus: int, uuids: Sequence[str]) -> str:
    """Say that the first entry of CUDA_VISIBLE_DEVICES is no GPU of this machine; CUDA ignores what follows it."""
    first = visible.split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        is_there = not uuids or first.startswith("MIG-") or any(uuid.startswith(first) for uuid in uuids)
    else:
        is_there = first.isdecimal() and int(first) < gpus
    if is_there:
        return ""
    there = "is one GPU, number 0" if gpus == 1 else f"are {gpus} GPUs, numbers 0 to {gpus - 1}"
    slurm = " (Slurm has given this job none: request one with --gpus-per-node)" if first == "NoDevFiles" else ""
    return f"CUDA_VISIBLE_DEVICES={visible} names a device that does not exist{slurm}; there {there}: correct it"


def _failure() -> str:
    """Return the first line of the error with which torch refuses to use CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0]
    return ""


def _opens(node: Path) -> bool:
    """Return whether this process may open a device node: a scheduler's cgroup refuses what the mode allows."""
    try:
        os.close(os.open(node, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        return True  # another problem, which torch names
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
