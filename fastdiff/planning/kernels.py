"""Kernels of a pass as rows of work, and the time that a GPU takes for a row."""

from dataclasses import dataclass
from typing import Literal

from fastdiff.models.cost.traced import Traced
from fastdiff.planning.gpus import Gpu
from fastdiff.planning.rates import Shares

Kind = Literal["matmul", "convolution", "attention", "short_attention", "streaming", "eager", "copies"]
"""Field of ``Shares`` with the rate: of operations for the first four, of bytes for the others."""

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
        return self.operations / (share * gpu.rates[self.dtype or dtype]) + self.bytes / (share * gpu.bandwidth)


def of_traced(traced: Traced, *, fused: bool, recompute: bool) -> tuple[Kernels, ...]:
    """Return the rows of a traced pass.

    Args:
        traced: the pass, run eagerly.
        fused: whether its blocks are compiled when it trains, so that fewer bytes move.
        recompute: whether it recomputes blocks, so that it saves little.
    """
    moved = _FUSED * traced.saved if fused and not recompute else traced.bytes
    return (
        Kernels(kind="matmul", operations=traced.matmul),
        Kernels(kind="convolution", operations=traced.convolution),
        Kernels(kind="attention", operations=traced.attention),
        Kernels(kind="short_attention", operations=traced.short_attention),
        Kernels(kind="streaming" if fused else "eager", bytes=moved),
    )
