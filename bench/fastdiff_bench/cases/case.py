"""A benchmark case: one op at one shape and dtype."""

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
    """Its file in ``fastdiff_kernels``."""
    backends: tuple[str, ...] = ("triton", "reference", "compile")
    """Its implementations; the default is ``auto`` if listed, the first if no kernel is, otherwise the choice of
    ``dispatch.choose``.
    """
    chosen_as: str | None = None
    """The op whose choice this one follows; None: it has its own."""
    shape: str
    """Name of the shape, after its model."""
    dtype: torch.dtype
    least_arch: int = 80
    """Oldest compute capability that has its number formats; 90 is sm_90."""
    build: Callable[[str], Inputs]
    """Returns fresh random inputs on a device, a few MB; inputs that get a gradient require one."""
    build_large: Callable[[str], Inputs] | None = None
    """The same with the batch of a training step on one GPU, which is timed there; None: ``build``."""
    call: Callable[[Inputs, Any], Outputs]
    """Runs the op on these inputs by one of ``backends``."""
    exact: Callable[[Inputs], Outputs] | None = None
    """The op in fp64, for inputs in fp64; None: the reference."""
    sums: tuple[str, ...] = ()
    """Results that are sums over many rows, such as ``dbias``; ``assert_no_worse`` compares them in RMS alone."""
    narrow: tuple[str, ...] = ()
    """Kernels that move almost no data at this shape; their accesses may be narrower than 128 bits."""
    forward_bytes: Callable[[Inputs], int] | None = None
    """Least bytes that the forward pass can move; None: every input read once and every output written once."""
    backward_bytes: Callable[[Inputs], int] | None = None
    """The same for the backward pass; None: upstream gradients and inputs read once, gradients written once."""
    forward_operations: Callable[[Inputs], int] | None = None
    """Least operations of the forward pass when it moves the least bytes; None: not counted.

    An addition, multiplication, division or comparison of two numbers counts as one, and so does a root, exponential,
    logarithm, sine or cosine, whatever its instructions. Random bits count as the integer operations that produce them.
    Conversions, signs, selections and addresses do not count, nor does work per row, channel, group or sample. For ops
    made of matrix products only these count, as is customary.
    """
    backward_operations: Callable[[Inputs], int] | None = None
    """The same for the backward pass, including recomputation of values that were not stored."""
    arithmetic: str = "fp32"
    """Precision of the operations, as in ``Limits.matmul``; for matrix products, their precision."""
    other_libraries: Mapping[str, Callable[[Inputs], Callable[[], Outputs]]] = field(default_factory=dict)
    """Implementations of other libraries by name: each prepares for the inputs and returns the call to time. It raises
    ImportError if its library is not installed, and returns no outputs if they cannot be compared.
    """

    def in_fp64(self, inputs: Inputs) -> Outputs:
        """Return the exact outputs for inputs in fp64."""
        return self.exact(inputs) if self.exact else self.call(inputs, "reference")

    def gradients(self, inputs: Inputs, outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of the inputs that require one; none if none does."""
        wanted = list(differentiable(inputs).values())
        reached = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
        if not wanted or not reached:
            return ()
        ends, seeds = zip(*reached, strict=True)
        return torch.autograd.grad(ends, wanted, seeds, retain_graph=True)

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype_name}"


def as_sequence(outputs: Outputs) -> Sequence[Tensor]:
    """Return outputs as a sequence, also for a single output."""
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def elements(name: str, count: int) -> Callable[[Inputs], int]:
    """Return a counter of ``count`` operations per element of the input ``name``."""
    return lambda inputs: count * int(inputs[name].numel())


def differentiable(inputs: Inputs) -> dict[str, Tensor]:
    """Return the inputs that require a gradient, by name."""
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad}
