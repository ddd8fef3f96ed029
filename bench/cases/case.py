"""One op at one shape and dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastdiff_kernels.dispatch import Backend

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op at one shape and dtype."""

    op: str
    """File of ``fastdiff_kernels`` that holds it."""
    shape: str
    """Name of the shape, after the model that has it."""
    dtype: torch.dtype
    build: Callable[[str], Inputs]
    """Fresh random inputs on a device; the tensors that get a gradient require one."""
    call: Callable[[Inputs, Backend], Tensor | Sequence[Tensor]]
    """The op on these inputs by the given backend."""
    narrow: tuple[str, ...] = ()
    """Kernels whose accesses may be narrower than 128 bits at this shape: those that move next to nothing."""

    def gradients(self, inputs: Inputs, outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients of the inputs that require one; none if none does."""
        wanted = [v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad]
        reached = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
        if not wanted or not reached:
            return ()
        ends, seeds = zip(*reached, strict=True)
        return torch.autograd.grad(ends, wanted, seeds, retain_graph=True)

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {str(self.dtype).removeprefix('torch.')}"
