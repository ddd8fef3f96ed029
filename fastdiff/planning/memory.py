"""Memory of a rank by class: what it holds between steps, and the most that passes, update, save and validation add.

What is held follows from the run: bytes per parameter, divided as ZeRO divides them. What a pass adds is traced.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdiff.models.cost.memory import BYTES, MOMENTS, Setup
from fastdiff.models.cost.traced import Traced

RESERVED = 3 * 2**30
"""Bytes of a GPU for the contexts and buffers of CUDA, cuBLAS, cuDNN and NCCL, and for what its allocator wastes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a rank."""

    weights: float
    """Of the network as it computes, with frozen ones and buffers."""
    masters: float
    """fp32 weights beside those of the network."""
    gradients: float
    moments: float
    averages: float
    activations: float
    """Alive at the peak of a pass: what is kept for the backward pass, and what the pass itself needs."""
    workspace: float
    """Of the engine at that time: buckets, gathered parameters, gradients that are not added up yet."""
    update: float
    """Temporary, of the update."""
    save: float
    """Copies from which a save is written; on a GPU they are in host memory, and 0 here."""
    validation: float
    """Averaged network of a validation or preview."""

    @property
    def held(self) -> float:
        """Bytes between two steps."""
        return self.weights + self.masters + self.gradients + self.moments + self.averages

    @property
    def peak(self) -> float:
        """The most bytes at once."""
        return self.held + max(self.activations + self.workspace, self.update, self.save, self.validation)


def memory(setup: Setup, traced: Traced, *, on_cpu: bool = False, validates: bool = False, draws: bool = False) -> Memory:
    """Predict the memory of a rank.

    Args:
        setup: of the run, with its micro-batch.
        traced: a pass of its network, with recomputation if the run has it.
        on_cpu: whether the rank trains on a CPU, whose update and saves have copies in the same memory.
        validates: whether the run measures losses on held-out data.
        draws: whether it draws samples.
    """
    n, share = setup.trained, 1 / setup.ranks
    static = setup.static()
    own = BYTES[setup.precision]
    device = 0.0 if setup.offload else 1.0
    cut = share if setup.stage else 1.0
    moments = device * n * MOMENTS[setup.optimizer] * cut
    beside = own * n if setup.flat and setup.stage == 0 else 0
    kept = 1.0 if setup.stage == 0 else 0.0
    peak = traced.peak(setup.micro, kept)
    found = Memory(
        weights=static["weights"],
        masters=static["optimizer"] - moments,
        gradients=static["gradients"] - beside,
        moments=moments,
        averages=static["averages"],
        activations=peak,
        workspace=0.0,
        update=0.0,
        save=0.0,
        validation=max(own * validates, 4 * draws) * n,
    )
    return found
