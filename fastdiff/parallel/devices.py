"""The device of a process: a GPU or the CPU, never the CPU by accident; and what a GPU can compute."""

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from fastdiff.errors import ConfigError, require
from fastdiff.parallel.unusable_gpu import gpus_are_hidden, unusable_gpu

Asked = Literal["auto", "cuda", "cpu"]
Capability = tuple[int, int]
"""Compute capability of a GPU: (9, 0) is sm_90."""

_BF16 = (8, 0)
"""Ampere, the first capability with bf16 arithmetic."""


def select_device(asked: Asked = "auto", local_rank: int = 0, local_size: int = 1) -> torch.device:
    """Return the device of this process, and make a GPU the current one.

    Args:
        asked: auto: a GPU where there is one, otherwise the CPU; cuda: a GPU; cpu: the CPU even beside a GPU.
        local_rank: number of this process on this machine, and of its GPU.
        local_size: processes on this machine. They may be more than this process sees GPUs: a launcher that shows each
            of them its own GPU calls it number 0.

    Raises:
        ConfigError: a GPU is present that torch cannot use, or for which this torch has no code; there is no GPU of
            this number; ``cuda`` without a GPU.
    """
    gpus = usable_gpus(asked)
    if not gpus:
        return torch.device("cpu")
    require_gpu(gpus, local_rank, local_size)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    problem = architecture_problem(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list())
    require(problem is None, f"{torch.cuda.get_device_name(device)}: {problem}")
    return device


def usable_gpus(asked: Asked = "auto") -> int:
    """Return the number of usable GPUs, without a CUDA context; 0: the CPU. ConfigError: torch cannot use one."""
    if asked == "cpu":
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about the driver; the error below says more
        if torch.cuda.is_available():
            return torch.cuda.device_count()
    if why := unusable_gpu(required=asked == "cuda"):
        raise ConfigError(why)
    hidden = " (CUDA_VISIBLE_DEVICES hides all)" if gpus_are_hidden() else ""
    require(
        asked == "auto",
        f"--performance.device cuda: this run, or its preset, is made for GPUs, and there is none here{hidden}; start "
        "it on a machine with a GPU, or add --performance.device cpu to run it on the CPU, slowly",
    )
    return 0


def require_gpu(gpus: int, rank: int, ranks: int) -> None:
    """Raise ConfigError if a machine with ``ranks`` processes has no GPU for the one of number ``rank``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    require(
        rank < gpus,
        f"this machine has {gpus} GPU{'' if gpus == 1 else 's'}{why}, none for its rank {gpus} of "
        f"{max(ranks, rank + 1)}; request one GPU per rank, or start fewer ranks per node",
    )


def require_precision(precision: str, device: torch.device, flag: str = "--performance.precision") -> None:
    """Raise ConfigError if a GPU has no arithmetic for a precision."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    problem = precision_problem(precision, capability)
    require(problem is None, f"{flag} {precision}: {problem}; use {flag} fp16")


def precision_problem(precision: str, capability: Capability | None) -> str | None:
    """Return why a GPU cannot compute in a precision; None: it can, or there is no GPU (``capability`` None)."""
    if precision != "bf16" or capability is None or capability >= _BF16:
        return None
    return f"this GPU (sm_{_joined(capability)}) has no bf16 arithmetic, which begins with sm_80; torch emulates it"


def architecture_problem(capability: Capability, built: Sequence[str]) -> str | None:
    """Return why a torch has no code for a GPU; None if it has.

    Code for sm_86 runs on every later GPU of its major version, sm_90a only on sm_90, compute_90 (PTX) on every later
    GPU, sm_100f on every later one of its major version.

    Args:
        capability: of the GPU.
        built: architectures of torch (``torch.cuda.get_arch_list``); empty: unknown.
    """
    if torch.version.hip is not None:  # names of AMD's architectures, such as gfx942, are no capabilities
        return None
    if not built or any(_runs(capability, architecture) for architecture in built):
        return None
    return (
        f"this torch ({torch.__version__}) has no code for sm_{_joined(capability)}, only for {', '.join(built)}; "
        f"install {_release_for(capability, built)}"
    )


def _runs(capability: Capability, architecture: str) -> bool:
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if not found:
        return False
    kind, code, variant = found[1], (int(found[2]), int(found[3])), found[4]
    if variant == "a":
        return code == capability
    if kind == "compute" and not variant:
        return code <= capability
    return code[0] == capability[0] and code <= capability


def _release_for(capability: Capability, built: Iterable[str]) -> str:
    oldest = min((int(n) for a in built for n in re.findall(r"_(\d+)", a)), default=0)
    if int(_joined(capability)) < oldest:
        return "a torch for an older CUDA version, for example from https://download.pytorch.org/whl/cu126"
    return "a newer torch, for example from https://download.pytorch.org/whl/cu130"


def _joined(capability: Capability) -> str:
    return "".join(map(str, capability))
