"""Kernels of a pass as rows of work, and the time that a GPU takes for a row."""

from dataclasses import dataclass
from typing import Literal

from fastdiff.models.cost.traced import Traced
from fastdiff.planning.gpus import Gpu
from fastdiff.planning.rates import Shares

Kind = Literal["matmul", "convolution", "attention", "short_attention", "streaming", "eager", "copies", "counted"]
"""Field of ``Shares`` with the rate: of operations for the first four, of bytes for the others; of bytes, instructions
and special functions for the last."""
_OVERLAP = 3.0
"""Order of the norm of the times by bytes, instructions and special functions: the largest binds, and is lengthened by
another that is close. 3 fits the kernels of a DiT block on an H200
(``bench/results/nvidia-h200/2026-11-26_kernels``), of which only GELU's backward has all three close."""
_GAP_S = 1.8e-6
"""Seconds between two kernels without a CUDA graph: what 1,872 launches of that step leave unused."""

_FUSED = 3.1
"""Bytes that the kernels of compiled blocks move beside products, per byte that a forward pass saves. ``fastdiff bench
emit`` counts it in Inductor's code: 2.9 for DiT-XL/2 and 3.4 for Stable Diffusion 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels of one kind in a forward and backward pass of one sample."""

    kind: Kind
    operations: float = 0.0
    """Floating-point operations of products, whose bytes are hidden behind them."""
    bytes: float = 0.0
    """Bytes that are read and written, each operand once."""
    instructions: float = 0.0
    """Warp instructions of counted kernels."""
    special: float = 0.0
    """Special functions of counted kernels."""
    idle: float = 1.0
    """How much longer counted kernels take because their last wave leaves processors idle."""
    launches: float = 0.0
    """Counted launches, for the gaps between them."""
    dtype: str | None = None
    """Key of the GPU's rates; None: that of the run."""
    name: str = ""
    """In words, where a table shows the row."""

    def seconds(self, gpu: Gpu, dtype: str, shares: Shares) -> float:
        """Return the time of these kernels.

        Args:
            gpu: on which they run.
            dtype: of the run, a key of the GPU's rates.
            shares: of the GPU's rates that are reached.
        """
        share: float = getattr(shares, self.kind)
        if self.kind == "counted":
            return self._bound(gpu) / share + self.launches * _GAP_S
        return self.operations / (share * gpu.rates[self.dtype or dtype]) + self.bytes / (share * gpu.bandwidth)

    def _bound(self, gpu: Gpu) -> float:
        held = gpu.known_multiprocessors()
        times = (self.bytes / gpu.copy_rate, self.instructions / held.issue, self.special / held.special)
        return float(self.idle * sum(time**_OVERLAP for time in times) ** (1 / _OVERLAP))


def of_traced(traced: Traced, *, fused: bool) -> tuple[Kernels, ...]:
    """Return the rows of a traced pass.

    Args:
        traced: the pass, run eagerly.
        fused: whether its blocks are compiled when it trains, so that fewer bytes move.
    """
    # A block that runs again saves then what it would have saved at first, and moves a third more: its forward pass.
    saved = traced.saved + traced.saved_again
    moved = _FUSED * saved * (1 + traced.recomputed / 3) if fused else traced.bytes
    return (
        Kernels(kind="matmul", operations=traced.matmul),
        Kernels(kind="convolution", operations=traced.convolution),
        Kernels(kind="attention", operations=traced.attention),
        Kernels(kind="short_attention", operations=traced.short_attention),
        Kernels(kind="streaming" if fused else "eager", bytes=moved),
    )
