"""Optimizer family: one frozen record per optimizer with all that the other packages need of it.

No module outside ``config/optimizers`` and ``training/optimizer`` compares the name of an optimizer: it asks the
record. The record imports no torch. It names code as ``module:NAME``, which is imported on first use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from fastdiff.config.sections.optim import OptimConfig

Unit = Literal["element", "block", "matrix", "parameter"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
"""Bytes per entry of each dtype that state may have, by torch's name."""
STEP_BY_STEP = "fastdiff.training.optimizer.update:StepUpdate"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """A tensor of the optimizer's state; zeros before the first step."""

    name: str
    """Its key in ``optimizer.state[parameter]``, and its name in checkpoints."""
    unit: Unit = "element"
    """What has one entry: each element of a parameter, each block of ``block`` neighbouring elements, each parameter
    of two or more dimensions (matrix), or each parameter."""
    dtype: str = "float32"
    """A key of ``BYTES``."""
    block: int = 1
    """Elements of a block."""
    of: Literal["all", "matrices", "others"] = "all"
    """Which parameters have it: all, those in which the network declares matrices (``models.matrices``), or others."""

    def elements_per_entry(self, shape: Sequence[int], *, matrix: bool = False) -> int:
        """Return the elements of a parameter that share an entry; 0: it has none.

        Args:
            shape: of the parameter.
            matrix: whether the network declares matrices in it.
        """
        if self.of != "all" and matrix != (self.of == "matrices"):
            return 0
        if self.unit in ("element", "block"):
            return self.block
        return prod(shape) if self.unit == "parameter" or len(shape) > 1 else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixStep:
    """What a step costs on each matrix that the network declares, of which one rank makes the update."""

    flops: Callable[[int, int], int]
    """Returns the floating-point operations on a matrix of these rows and columns: two per multiply-add of products."""
    dtype: Callable[[Any], str]
    """Returns the dtype of these products and of what the ranks send, fp32 or bf16, by the configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFamily:
    """Properties of an optimizer."""

    name: str
    """Value of ``--optim.name``, recorded in ``run.json`` and checkpoints."""
    config: type[OptimConfig]
    """Type of its configuration, whose own fields are its hyper-parameters."""
    optimizer: str
    """``module:CLASS`` of its ``torch.optim.Optimizer``. It is called with the parameters, the hyper-parameters and
    ``arguments``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments, equal in all runs."""
    state: tuple[StateTensor, ...] = ()
    """Its state, apart from ``step``."""
    counts: Literal["tensor", "int"] | None = None
    """How it keeps ``state[parameter]["step"]``, the number of its steps: in a scalar fp32 tensor on the device of the
    parameter, or in an int. None: it does not count."""
    whole_matrices: bool = False
    """Whether it needs whole parameters in their shapes. Otherwise it gets flat tensors with slices of parameters, as
    ZeRO cuts them, and updates each element by itself."""
    matrix_step: MatrixStep | None = None
    """What a step costs on the matrices that the network declares; None: it does not ask for them. The class of one
    that asks derives from ``training.optimizer.owners.OverRanks``."""
    sliced: bool = True
    """Whether checkpoints hold its state in slices of parameters, which any number of ranks and any ZeRO stage reads.
    Otherwise they hold it as raw memory (``checkpoint.bitsandbytes_state``)."""
    smallest: int = 1
    """Elements of the smallest tensor whose state has the dtypes of ``state``; smaller ones have fp32."""
    create_state: str | None = None
    """``module:FUNCTION(optimizer, flats, world)`` that creates the state under DeepSpeed, on all ranks at once. None:
    the optimizer creates it in its first step."""
    flat_update: str | None = STEP_BY_STEP
    """``module:CLASS`` of its update in the flat engine (``training.optimizer.update``), for example a fused kernel; by
    default its ``step``. None: the flat engine does not have it."""
    ordered_arguments: Mapping[str, Any] | None = None
    """Arguments with which the update has the same bits however ranks cut the weights, for sums in one order
    (``--performance.grad_accum_order micro_batches``). If there are any, every engine takes its ``step``. None: nobody
    promises that, and such sums are refused under ZeRO-1 to 3."""
    kernel: str | None = None
    """Op of ``fastdiff_kernels`` that updates the weights; None: it is code of ``library``."""
    kernel_in: Literal["flat engine", "every engine"] = "flat engine"
    """Engines in which the op updates them."""
    without_compiler: str | None = None
    """``module:FUNCTION`` that says why the op cannot be compiled for a host; None: it never is."""
    library: str = "torch"
    """Package with its class."""
    remedy: str = "use --optim.name adamw"
    """What to do where it does not run."""
    smaller: str | None = None
    """Name of an optimizer with less state that can replace it under equal flags; None: there is none."""
    aliases: tuple[str, ...] = ()
    """Its names in other trainers, in lower case."""
    adamw_moments: str | None = None
    """``module:FUNCTION(saved)`` that reads its state as moments of ``torch.optim.AdamW`` (``export.adamw_state``);
    None: an export leaves its state out."""
    of_adam_size: bool = False
    """Whether its update of an element is about the learning rate, however large the gradient is, as Adam's: then the
    rates of muP (``ModelConfig.lr_multiplier``) are right for it."""
    continues_adamw: bool = False
    """Whether it has the state and the hyper-parameters of ``torch.optim.AdamW``, so that it continues a published
    training."""

    @property
    def elements(self) -> tuple[StateTensor, ...]:
        """State with one entry per element."""
        return tuple(tensor for tensor in self.state if tensor.unit == "element")

    def state_bytes(self, matrices: float = 0.0) -> float:
        """Return the bytes of state per trained element; entries of blocks, matrices and parameters do not count.

        Args:
            matrices: share of the trained elements that lie in matrices which the network declares.
        """
        shares = {"all": 1.0, "matrices": matrices, "others": 1.0 - matrices}
        return sum(shares[tensor.of] * BYTES[tensor.dtype] for tensor in self.elements)

    def engine_update(self, *, in_order: bool) -> str | None:
        """Return ``flat_update``, or with sums ``in_order`` what gives the bits of the other engines."""
        return STEP_BY_STEP if in_order and self.ordered_arguments else self.flat_update

    @property
    def bits(self) -> int:
        """Bits of the smallest state with one entry per element: 32, 16 or 8."""
        return min((8 * BYTES[tensor.dtype] for tensor in self.elements), default=32)

    @property
    def elementwise(self) -> bool:
        """Whether the update of an element depends on no other, so that the order of the elements does not matter."""
        return not self.whole_matrices and all(tensor.unit == "element" for tensor in self.state)
