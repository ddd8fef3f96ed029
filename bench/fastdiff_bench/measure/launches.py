"""Count of the operations that a step launches on the device."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""Prefixes of CUDA runtime and driver calls that launch a kernel or a graph."""
_OPERATOR = "aten::"


def count(step: Callable[[], object], device: torch.device) -> tuple[int, str]:
    """Take one step under torch's profiler and count its launches.

    Returns:
        The number and its kind: kernel launches on a GPU; on a CPU, operators that no other operator called.
    """
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiler:
        step()
        if on_cuda:
            torch.cuda.synchronize()
    events = profiler.events() or []
    if on_cuda:
        return sum(event.name.startswith(_LAUNCHES) for event in events), "CUDA kernel launches"
    return sum(_is_outermost(event) for event in events), "operators that no other operator called"


def _is_outermost(event: Any) -> bool:
    if not event.name.startswith(_OPERATOR):
        return False
    caller = event.cpu_parent
    while caller is not None:
        if caller.name.startswith(_OPERATOR):
            return False
        caller = caller.cpu_parent
    return True
