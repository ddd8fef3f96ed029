"""Roofline budget of a step: the least time of each operation alone, by class.

An operation takes at least its floating-point operations at the measured rate of matrix products, and its bytes, those
of its inputs and outputs once, at the measured rate of a copy; the budget is the sum of the larger of both. Compiled
code fuses operations, and so may need less than the budget of its elementwise ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fastdiff.training.profiling.ranges import named_ranges
from fastdiff.training.state import TrainState
from fastdiff_bench.measure.roofline import Limits
from fastdiff_bench.tracing.classes import Class, of_operator

Work = dict[str, list[tuple[float, float, int]]]
"""By class: floating-point operations and bytes of an operation, and how often there is such a one."""


def count(state: TrainState, step: Callable[[], object]) -> Work:
    """Take a step, with its blocks not compiled, and return the work of its operations."""
    counted = _Counted()
    with named_ranges(state, counted.enter), counted:
        step()
    return {kind: [(*work, times) for work, times in found.items()] for kind, found in counted.work.items()}


def seconds(work: Work, limits: Limits, precision: str) -> dict[str, float]:
    """Return the budget of a step by class; without a measured rate of products of the precision, of bytes alone."""
    rate = limits.matmul_flops_per_s.get(precision, float("inf"))
    return {
        kind: sum(times * max(flops / rate, size / limits.copy_bytes_per_s) for flops, size, times in found)
        for kind, found in work.items()
    }


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of all operations; those in the range of the optimizer are its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: dict[str, dict[tuple[float, float], int]] = {}
        self._within: list[_Entered] = []

    def enter(self, name: str) -> _Entered:
        """Begin a named range."""
        self._within = [entered for entered in self._within if not entered.closed]
        self._within.append(_Entered(name))
        return self._within[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inside = any(of_operator(e.name, None) == "optimizer" for e in self._within if not e.closed)
        within: Class | None = "optimizer" if inside else None
        kind = of_operator(func.name().partition(".")[0], within)
        if kind is not None and not func.is_view:
            packet = func._overloadpacket
            flops = float(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0.0
            tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}
            size = float(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
            found = self.work.setdefault(kind, {})
            found[flops, size] = found.get((flops, size), 0) + 1
        return result


@dataclass(slots=True)
class _Entered:
    """A named range."""

    name: str
    closed: bool = field(default=False)

    def close(self) -> None:
        """End it."""
        self.closed = True
