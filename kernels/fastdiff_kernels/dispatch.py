"""Choice of the implementation of each op, and a report of the choices.

Each op has three implementations: ``triton`` (the kernel), ``reference`` (plain torch next to it) and ``compile`` (the
reference under ``torch.compile``). The ``backend`` argument of a call takes precedence over ``force`` for the process,
and that over the default: the kernel on a CUDA device, the reference elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fastdiff_kernels import launch
from fastdiff_kernels.names import BACKENDS, OPS, Backend

_forced: dict[str, Backend] = {}


def force(backends: Mapping[str, Backend]) -> None:
    """Set the backend of the named ops for the whole process; all other ops return to their default.

    Raises:
        ValueError: an op or a backend that does not exist.
    """
    for op, backend in backends.items():
        _check_op(op)
        _check(backend)
    _forced.clear()
    _forced.update(backends)


@contextmanager
def forced(**backends: Backend) -> Iterator[None]:
    """``force`` inside a ``with`` block, in addition to the backends that are forced already."""
    before = dict(_forced)
    force({**before, **backends})
    try:
        yield
    finally:
        force(before)


def choose(op: str, tensor: Tensor, backend: Backend | None = None) -> Backend:
    """Return the implementation of ``op`` for ``tensor``.

    Args:
        op: one of ``names.OPS``.
        tensor: an argument of the op; its device decides.
        backend: the caller's choice; None: the forced one, otherwise Triton on a CUDA device where it is installed,
            otherwise the reference.

    Raises:
        ValueError: no such op or backend.
        RuntimeError: Triton was requested and cannot run on this tensor.
    """
    return explained(op, tensor, backend)[0]


def explained(op: str, tensor: Tensor, backend: Backend | None = None) -> tuple[Backend, str]:
    """Return the result of ``choose`` and the reason in a few words."""
    _check_op(op)
    asked = backend or _forced.get(op)
    if asked is not None:
        _check(asked)
        if asked == "triton":
            _check_triton(op, tensor)
        return asked, "asked for" if backend else "forced"
    if launch.triton is None:
        return "reference", "Triton is not installed"
    if not tensor.is_cuda:
        return "reference", f"the tensor is on {tensor.device.type}"
    return "triton", "on CUDA"


def _check_op(op: str) -> None:
    if op not in OPS:
        raise ValueError(f"op {op!r}: expected one of {', '.join(OPS)}")


def _check(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r}: expected 'triton', 'reference', 'compile' or None (the default)")


def _check_triton(op: str, tensor: Tensor) -> None:
    if launch.triton is None:
        raise RuntimeError(f"{op}, backend 'triton': Triton is not installed; install it or use backend 'reference'")
    if not launch.runs_on(tensor):
        raise RuntimeError(
            f"{op}, backend 'triton': the tensor is on {tensor.device}, expected CUDA; use backend 'reference', "
            "or set TRITON_INTERPRET=1 before the first import of triton"
        )


_RECOMPILES = 1024
"""Limit of the variants (shapes, flags) of one reference that are compiled; a UNet has dozens, torch's limit is 8."""


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo import config  # its import takes seconds

    compiled = torch.compile(function, fullgraph=True)

    @wraps(function)
    def call(*args: Any) -> Any:
        with config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=_RECOMPILES):
            return compiled(*args)

    return call


def plain(function: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """Return a reference as ``backend`` runs it: compiled for ``compile``, unless inside a compilation."""
    return _compiled(function) if backend == "compile" and not torch.compiler.is_compiling() else function


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation of an op in one layer, and the reason."""

    op: str
    forward: str
    backward: str
    """``-`` where no gradient flows."""
    why: str


def choice(op: str, example: Tensor, *, differentiated: bool = True) -> Choice:
    """The ``Choice`` of an op whose forward and backward have the same implementation.

    Args:
        op: one of ``names.OPS``.
        example: a tensor of the device that the op will work on.
        differentiated: False for an op through which no gradient flows.

    Raises:
        ValueError: no such op.
        RuntimeError: Triton is forced and cannot run there.
    """
    chosen, why = explained(op, example)
    return Choice(op, chosen, chosen if differentiated else "-", why)


@runtime_checkable
class Explains(Protocol):
    """A module that calls ops of this package directly (not through a child module)."""

    def choices(self, example: Tensor) -> Iterator[Choice]:
        """Yield the ``Choice`` of each op in ``forward``, for inputs of the device and dtype of ``example``."""
        ...


def explain(model: nn.Module, example: Tensor | None = None) -> list[tuple[str, Choice]]:
    """The implementation of each op in each layer of ``model``, forward and backward.

    Args:
        model: its modules that call ops have a method ``choices`` (``Explains``).
        example: a tensor of the device and dtype that the model will compute in, of any shape; None: its first
            parameter.

    Returns:
        The name of each layer (``""`` for the model itself) with one ``Choice`` per op, in the order of the modules.
    """
    like = next(model.parameters()) if example is None else example
    return [
        (name, choice)
        for name, module in model.named_modules()
        if isinstance(module, Explains)
        for choice in module.choices(like)
    ]
