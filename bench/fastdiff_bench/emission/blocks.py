"""Counts of the code of a compiled block, forward and backward."""

from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeAlias

from fastdiff_bench.instructions.bounds import Launched

Way: TypeAlias = Literal["forward", "backward"]
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "float64": 8, "bool": 1, "uint8": 1}
_SIZES |= {"float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of an element by dtype."""


@dataclass(frozen=True, slots=True)
class Node:
    """One kernel, extern call or custom op in the scheduled code."""

    name: str
    """Kernel or op."""
    kind: str
    """``triton`` (written by Inductor), ``extern`` (a library's) or ``opaque`` (an op of fastdiff_kernels)."""
    bytes: int
    """Bytes of its operands, each counted once; of an opaque op those of its launches and copies."""
    launches: int
    writes: frozenset[str] = frozenset()
    """Names of the buffers that it writes, in the code."""


@dataclass(slots=True)
class Opaque:
    """One call of a custom op in a graph."""

    name: str
    launches: int
    """Kernels, with those of copies."""
    bytes: int
    """Bytes of the operands of each kernel and copy."""
    copies: list[tuple[int, ...]] = field(default_factory=list)
    """Shape of each tensor that the op copies into another layout before it works on it."""
    copied_bytes: int = 0
    """Bytes read and written by these copies."""
    kernels: list[Launched] = field(default_factory=list)
    """Its kernels, if they were compiled and counted."""

    @property
    def attends(self) -> bool:
        """Whether it is attention, whose rate is that of the tensor cores."""
        return self.name.startswith("fastdiff.short_attention")

    def counted(self) -> Node:
        """Return the op as a node of the scheduled code."""
        return Node(self.name, "opaque", self.bytes, self.launches)


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and strides of a tensor at the border of a graph."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * _SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix products, convolutions or attention in a graph: what the rate of the tensor cores decides."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors among its arguments."""
    out: tuple[int, ...]


@dataclass(slots=True)
class Pass:
    """The forward or the backward graph of a block."""

    kernels: int
    """Distinct Triton kernels that Inductor wrote."""
    nodes: list[Node]
    inputs: list[Layout]
    """Without parameters."""
    outputs: list[Layout]
    """Of a forward graph those of the block; of a backward graph all gradients."""
    saved: list[Layout]
    """Activations that a forward graph stores for the backward graph, without parameters."""
    opaque: list[Opaque]
    products: list[Product]
    code: str
    written: list[Launched] = field(default_factory=list)
    """Launches of the kernels that Inductor wrote, if they were compiled and counted."""

    @property
    def kernels_counted(self) -> list[Launched]:
        """Launches that were compiled and counted: Inductor's and fastdiff's."""
        return [*self.written, *(kernel for op in self.opaque for kernel in op.kernels)]

    @property
    def elementwise(self) -> list[Launched]:
        """Those without attention, whose rate is that of the tensor cores."""
        return [*self.written, *(kernel for op in self.opaque if not op.attends for kernel in op.kernels)]

    @property
    def launches(self) -> int:
        """Launches of one call: kernels of Inductor, of libraries (at least one each) and of fastdiff's ops."""
        return sum(node.launches for node in self.nodes)

    @property
    def streamed(self) -> int:
        """Bytes of all but the libraries' products and attention: what the memory's bandwidth decides."""
        attention = sum(one.bytes - one.copied_bytes for one in self.opaque if one.attends)
        return sum(node.bytes for node in self.nodes if node.kind != "extern") - attention

    @property
    def copies(self) -> int:
        """Tensors that fastdiff's ops copy into another layout."""
        return sum(len(one.copies) for one in self.opaque)

    @property
    def copied(self) -> int:
        """Bytes of these copies."""
        return sum(one.copied_bytes for one in self.opaque)


@dataclass(slots=True)
class Block:
    """One compiled block, forward and backward, and the blocks of the network that share its code."""

    kind: str
    """Class of the block."""
    names: list[str] = field(default_factory=list)
    """Blocks of the network with this code."""
    forward: Pass | None = None
    backward: Pass | None = None
    restrided: int = 0
    """Gradients that arrive with other strides than the code expects, and are copied, over all these blocks."""
    restrided_bytes: int = 0
    """Bytes read and written by these copies."""

    @property
    def passes(self) -> list[tuple[Way, Pass]]:
        """Forward and backward, as far as they exist."""
        both: list[tuple[Way, Pass | None]] = [("forward", self.forward), ("backward", self.backward)]
        return [(way, found) for way, found in both if found is not None]

    @property
    def output(self) -> Layout:
        """First output: the residual stream, or the branch that is added to it."""
        assert self.forward is not None
        return self.forward.outputs[0]

    @property
    def elements(self) -> int:
        """Elements of the residual stream."""
        return prod(self.output.shape)

    @property
    def saved(self) -> int:
        """Bytes of the activations that one block stores for its backward pass."""
        return 0 if self.forward is None else sum(one.bytes for one in self.forward.saved)


@dataclass(frozen=True, slots=True)
class Emission:
    """Counts of a network in training: its blocks and what a budget needs to know of the rest."""

    blocks: list[Block]
    batch: int
    """Samples per micro-batch."""
    parameters: int
    tensors: int
    """Parameter tensors."""
    flops: float
    """Operations of a training step on one sample, blocks and all else."""
    outside_bytes: float
    """Bytes per sample of the operands of all kernels outside the blocks, forward and backward, without the loss."""
    instructions: bool = False
    """Whether the kernels of the blocks were compiled and counted."""
