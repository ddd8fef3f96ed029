"""One op at one shape and dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Outputs = Tensor | Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One op at one shape and dtype."""

    op: str
    """File of ``fastdiff_kernels`` that holds it."""
    backends: tuple[str, ...] = ("triton", "reference", "compile")
    """Its implementations; with ``auto`` among them that is the default, else ``dispatch.choose`` knows it."""
    shape: str
    """Name of the shape, after the model that has it."""
    dtype: torch.dtype
    build: Callable[[str], Inputs]
    """Fresh random inputs on a device, a few MB; the tensors that get a gradient require one."""
    build_large: Callable[[str], Inputs] | None = None
    """The same with the batch of a training step on one GPU, which is what is timed there; None: ``build``."""
    call: Callable[[Inputs, Any], Outputs]
    """The op on these inputs by one of ``backends``."""
    exact: Callable[[Inputs], Outputs] | None = None
    """The op in fp64, of inputs in fp64; None: that is what the reference computes of them."""
    narrow: tuple[str, ...] = ()
    """Kernels whose accesses may be narrower than 128 bits at this shape: those that move next to nothing."""
    forward_bytes: Callable[[Inputs], int] | None = None
    """Least bytes that the forward pass can move; None: every input read once and every output written once."""
    backward_bytes: Callable[[Inputs], int] | None = None
    """Likewise the backward pass; None: upstream gradients and inputs read once, gradients written once."""
    forward_operations: Callable[[Inputs], int] | None = None
    """Operations that the forward pass takes at least, when it moves the least bytes; None: not counted.

    An addition, multiplication, division or comparison of two numbers is one, and so is a root, exponential, logarithm,
    sine or cosine, whatever instructions it becomes. Random bits count as the integer operations that make them.
    Conversions, signs, selections and addresses are none, and so is what happens once per row, channel, group or
    sample. Of an op that is made of matrix products these alone are counted, as everyone does.
    """
    backward_operations: Callable[[Inputs], int] | None = None
    """Likewise the backward pass, with what it has to make again of what was not stored."""
    arithmetic: str = "fp32"
    """Precision of the operations, as in ``Limits.matmul``: that of the matrix products of an op that has them."""
    rivals: Mapping[str, Callable[[Inputs], Callable[[], Outputs]]] = field(default_factory=dict)
    """Implementations of other libraries by name: each prepares itself for the inputs and returns the call that is
    timed. It raises ImportError where its library is not installed, and returns no outputs if they cannot be compared.
    """

    def in_fp64(self, inputs: Inputs) -> Outputs:
        """The exact outputs of inputs in fp64."""
        return self.exact(inputs) if self.exact else self.call(inputs, "reference")

    def gradients(self, inputs: Inputs, outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients of the inputs that require one; none if none does."""
        wanted = list(differentiable(inputs).values())
        reached = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
        if not wanted or not reached:
            return ()
        ends, seeds = zip(*reached, strict=True)
        return torch.autograd.grad(ends, wanted, seeds, retain_graph=True)

    @property
    def dtype_name(self) -> str:
        """``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype_name}"


def as_sequence(outputs: Outputs) -> Sequence[Tensor]:
    """Outputs as a sequence also where there is one."""
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def elements(name: str, count: int) -> Callable[[Inputs], int]:
    """``count`` operations for every element of the input ``name``."""
    return lambda inputs: count * int(inputs[name].numel())


def differentiable(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs that get a gradient, by name."""
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad}
