"""How much work a step hands to the device, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""How the names of the calls of CUDA's runtime and driver begin that launch a kernel, or a graph of them."""
_OPERATOR = "aten::"


def count(step: Callable[[], object], device: torch.device) -> tuple[int, str]:
    """Take one step under torch's profiler and count what it launches.

    Args:
        step: a whole one, the caches warm.
        device: where it computes.

    Returns:
        The number, and what it counts: kernels on a GPU; on a CPU, operators that no other operator called.
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
