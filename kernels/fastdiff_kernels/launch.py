"""Which implementation of an op runs: the plain torch reference or the Triton kernel.

Triton has no wheel for some systems, and a CPU runs its kernels only under ``TRITON_INTERPRET=1``. The kernel
files import ``triton``, ``tl`` and ``jit`` from here, so that they can be imported everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, get_args

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

Backend = Literal["torch", "triton"]

INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether Triton's kernels run in its interpreter, on a CPU. Fixed when a kernel is defined."""


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, or ``function`` unchanged where Triton is not installed (it is then never launched)."""
    return function if triton is None else triton.jit(function)


def choose(backend: Backend | None, tensor: Tensor) -> Backend:
    """The implementation that works on ``tensor``.

    Args:
        backend: what the caller asks for; None: Triton on a CUDA device where it is installed, else torch.
        tensor: an argument of the op; its device decides.

    Raises:
        ValueError: no such backend.
        RuntimeError: Triton was asked for and cannot run on this tensor.
    """
    if backend is None:
        return "triton" if triton is not None and tensor.is_cuda else "torch"
    if backend not in get_args(Backend):
        raise ValueError(f"backend {backend!r}: expected 'torch', 'triton' or None (choose by the device)")
    if backend == "triton" and triton is None:
        raise RuntimeError("backend 'triton': Triton is not installed; install it or use backend 'torch'")
    if backend == "triton" and not (tensor.is_cuda or INTERPRETED):
        raise RuntimeError(
            f"backend 'triton': the tensor is on {tensor.device}, expected CUDA; use backend 'torch', "
            "or set TRITON_INTERPRET=1 before the first import of triton"
        )
    return backend
