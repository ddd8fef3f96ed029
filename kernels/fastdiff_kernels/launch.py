"""Triton as the kernel files use it: defining kernels, launching them, and recording launches instead.

Triton has no wheel for some systems, and a CPU runs its kernels only under ``TRITON_INTERPRET=1``. The kernel
files import ``triton``, ``tl``, ``jit`` and ``run`` from here, so that they can be imported everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

triton: Any
"""The package, or None where it is not installed."""
tl: Any
"""``triton.language``, or None."""
try:
    triton = import_module("triton")
    tl = import_module("triton.language")
except ImportError:
    triton = tl = None

REGISTERS = 2**16
"""Registers of a processor, sm_80 to sm_100."""
INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether Triton's kernels run in its interpreter, on a CPU. Fixed when a kernel is defined."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch that was recorded and did not run."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    """Positional arguments: tensors and numbers."""
    options: dict[str, Any]
    """Keyword arguments: the kernel's constexprs, ``num_warps``, ``num_stages``."""


_recorded: list[Launch] | None = None
_stands_for = 90, 132
"""Compute capability and multiprocessors of the GPU that CPU tensors stand for: an H200, outside ``recording``."""


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, or ``function`` unchanged where Triton is not installed (it is then never launched)."""
    return function if triton is None else triton.jit(function)


def constant(value: Any) -> Any:
    """A global that kernels may read: Triton accepts only its own constants."""
    return value if triton is None else tl.constexpr(value)


def run(kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> None:
    """Launch ``kernel`` on the device of its first tensor argument; an empty grid launches nothing.

    Args:
        kernel: from ``jit``.
        grid: number of programs along each of up to three axes.
        args: the kernel's run-time arguments, in order; the first tensor decides the device.
        options: the kernel's constexprs by name, ``num_warps``, ``num_stages``.
    """
    grid = tuple(grid)
    if 0 in grid:
        return
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, args, options))
        return
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(next(arg for arg in args if isinstance(arg, Tensor))):  # type: ignore[no-untyped-call]
        kernel[grid](*args, **options)


@jit
def _add_one(number_ptr):  # type: ignore[no-untyped-def]
    tl.store(number_ptr, tl.load(number_ptr) + 1)


def trial(device: torch.device) -> str | None:
    """Launch a trivial kernel; return why it fails, or None. The first launch of all builds a launcher in C."""
    if triton is None:
        return "Triton is not installed; pip install triton"
    try:
        number = torch.ones(1, dtype=torch.int32, device=device)
        run(_add_one, (1,), number)
        return None if number.item() == 2 else f"1 + 1 is {number.item()} on {device}"
    except Exception as error:  # of the compiler, the driver or the kernel
        return " ".join(f"{type(error).__name__}: {error}".split())[:500]


@contextmanager
def recording(capability: int | None = None, processors: int | None = None) -> Iterator[list[Launch]]:
    """Collect launches instead of running them, so that they can be compiled without a GPU.

    Inside, CPU tensors stand for GPU tensors, and the ops return uninitialised memory.

    Args:
        capability: compute capability of the GPU that they stand for, such as 90 for sm_90; None: as outside.
        processors: its streaming multiprocessors; None: as outside, where it is an H200.
    """
    global _recorded, _stands_for
    outer = _recorded, _stands_for
    _recorded, _stands_for = [], (capability or _stands_for[0], processors or _stands_for[1])
    try:
        yield _recorded
    finally:
        _recorded, _stands_for = outer


def runs_on(tensor: Tensor) -> bool:
    """Whether a Triton kernel can work on ``tensor``: on CUDA, in the interpreter, or while recording."""
    return triton is not None and (tensor.is_cuda or INTERPRETED or _recorded is not None)


def registers(programs: int, warps: int) -> int:
    """Most registers of a thread with which a processor holds so many programs at once; they are given out by eights.

    For the option ``maxnreg``, from sm_80 to sm_100.
    """
    return min(REGISTERS // (32 * warps * programs) // 8 * 8, 255)


def processors(tensor: Tensor) -> int:
    """Number of streaming multiprocessors of the tensor's device; of a CPU tensor that of ``recording``, or 132."""
    if not tensor.is_cuda:
        return _stands_for[1]
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def architecture(tensor: Tensor) -> int:
    """Compute capability of the tensor's device, 90 for sm_90; of a CPU tensor that of ``recording``, or 90."""
    if not tensor.is_cuda:
        return _stands_for[0]
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor
