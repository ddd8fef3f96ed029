"""Memory of a rank by class: what it holds between steps, and the most that passes, update, save and validation add.

What is held follows from the run: bytes per parameter, divided as ZeRO divides them. What a pass adds is traced
(``models.cost.traced``); the engine's own buffers follow from how it reduces gradients.
"""

from dataclasses import dataclass

from fastdiff.config.optimizers.registry import optimizer_family
from fastdiff.models.cost.memory import BYTES, Setup
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
    moments: float
    averages: float
    gradients: float
    """Sums of gradients; under ZeRO-1 and 2 without accumulation they exist in the pass alone, unless in one order."""
    buffers: float
    """Buckets that the engine keeps."""
    graphs: float
    """What CUDA graphs of the passes keep: activations and workspace, which are 0 then."""
    activations: float
    """The most that a pass has at once: what is kept for its backward pass, temporaries, and gradients of weights."""
    workspace: float
    """Of the engine beside them: gathered weights and buckets."""
    update: float
    """Temporary, of the update."""
    save: float
    """Copies from which a save is written; on a GPU they are in host memory, and 0 here."""
    validation: float
    """Averaged network of a validation or preview."""

    @property
    def held(self) -> float:
        """Bytes between two steps, gradients included."""
        state = self.weights + self.masters + self.moments + self.averages
        return state + self.gradients + self.buffers + self.graphs

    @property
    def peak(self) -> float:
        """The most bytes at once."""
        return self.held + max(self.activations + self.workspace, self.update, self.save, self.validation)


def memory(
    setup: Setup,
    traced: Traced,
    *,
    accumulates: bool = True,
    bucket: int = 500_000_000,
    on_cpu: bool = False,
    saves: bool = True,
    validates: bool = False,
    draws: bool = False,
) -> Memory:
    """Predict the memory of a rank.

    Args:
        setup: of the run, with its micro-batch.
        traced: a pass of its network, with recomputation if the run has it.
        accumulates: whether a step has several micro-batches.
        bucket: elements of gradients that ZeRO reduces at once.
        on_cpu: whether the rank trains on a CPU, whose update and saves have copies in the same memory.
        saves: whether the run writes checkpoints, its last step included.
        validates: whether the run copies the averaged network in its precision: for losses on held-out data, or for
            images of prompts.
        draws: whether it copies it in fp32, for a grid of classes.
    """
    n, share, static = setup.trained, 1 / setup.ranks, setup.static()
    own, sums = BYTES[setup.precision], BYTES[setup.sums if setup.several else setup.precision]
    moments = 0.0 if setup.offload else n * setup.state_bytes * (share if setup.stage else 1.0)
    masters = static["optimizer"] - moments
    gradients = static["gradients"] - (own * n if setup.flat and setup.stage == 0 else 0)
    grows = setup.stage in (1, 2) and not setup.in_order
    if grows and setup.ranks > 1 and not accumulates:
        gradients = 0.0  # they grow in the pass and are freed by the update
    passes, workspace = _pass(setup, traced, n, own, sums, min(n, bucket), held=gradients > 0)
    freed = gradients if grows else 0.0  # by the update, before a save or a validation
    fp32 = 0.0 if setup.offload else 4 * n * (share if setup.stage else 1.0)
    copies = [_copied(setup, n, width) for width, is_made in ((own, validates), (4, draws)) if is_made]
    saved = (fp32 + moments) * (1.0 if setup.stage else share) + static["averages"]
    return Memory(
        weights=static["weights"],
        masters=masters,
        moments=moments,
        averages=static["averages"],
        gradients=gradients,
        buffers=_kept_buckets(setup, n, own, sums, min(n, bucket)),
        graphs=passes + workspace if setup.captured else 0.0,
        activations=0.0 if setup.captured else passes,
        workspace=0.0 if setup.captured else workspace,
        update=max(_update(setup, n, own, sums, grown=gradients == 0) if on_cpu else 0.0, _unfused(setup, n)),
        save=max(saved - freed, 0.0) if on_cpu and saves else 0.0,
        validation=max(max(copies, default=0.0) - freed, 0.0),
    )


def _copied(setup: Setup, n: int, width: int) -> float:
    """Return the bytes of the averaged network in a dtype of this width; the frozen weights of a rank are not copied.

    Args:
        setup: of the run.
        n: trained parameters.
        width: bytes per element.
    """
    own = BYTES[setup.precision]
    if setup.stage < 3 and width == own and setup.frozen_bytes:
        return float(width * n)
    return width * (n + setup.frozen_bytes / own) + setup.buffer_bytes


def _kept_buckets(setup: Setup, n: int, own: int, sums: int, bucket: int) -> float:
    """Return the bytes of buckets that stay: DistributedDataParallel's, and the one of ZeRO-3."""
    if setup.stage == 3:
        return 0.0 if setup.in_order else bucket * sums
    return n * own if _has_buckets(setup) else 0.0


def _has_buckets(setup: Setup) -> bool:
    """Whether gradients are views of the buckets of DistributedDataParallel."""
    return setup.stage == 0 and setup.ranks > 1 and not (setup.captured or setup.in_order)


def _pass(setup: Setup, traced: Traced, n: int, own: int, sums: int, bucket: int, *, held: bool) -> tuple[float, float]:
    """Return the bytes that a pass has at most, with gradients of the weights, and those of the engine beside them.

    Args:
        setup: of the run.
        traced: a pass.
        n: trained parameters.
        own: bytes per element of the network.
        sums: bytes per element of the sums of gradients.
        bucket: elements of a bucket, at most ``n``.
        held: whether the sums are part of what is held.
    """
    micro = setup.micro
    if _has_buckets(setup):
        return traced.peak(micro, 0.0), 0.0
    if setup.ranks == 1 or setup.stage == 0:
        return traced.peak(micro, 1.0), 0.0
    gathered = float(own * n + setup.frozen_bytes) if setup.stage == 3 else 0.0  # all weights, for both passes
    if setup.in_order:
        # A bucket's gradients are there as they came, joined, and of all ranks; ZeRO-3 has a gathered bucket twice.
        twice = own * bucket if setup.stage == 3 else 0
        return traced.peak(micro, 3 * bucket / n), gathered + twice
    if setup.stage == 3:
        # A bucket's gradients are there as they came, joined, and cut.
        return traced.peak(micro, (2 + sums / own) * bucket / n), gathered
    # A bucket, its flattened copy, and the gradients that came if those have another dtype.
    reduced = bucket * (2 * sums + (own if own != sums else 0))
    if bucket < n:
        return traced.peak(micro, 0.0 if held else sums / own / setup.ranks), float(reduced)
    growing = traced.peak(micro, sums / own + (1 if own != sums else 0))
    return max(growing, float(reduced)), 0.0  # reduced once, after the last gradient


def _unfused(setup: Setup, n: int) -> float:
    """Return the temporary bytes of an optimizer whose operations are not fused because of sums in one order."""
    if not setup.in_order or not optimizer_family(setup.optimizer).ordered_arguments:
        return 0.0
    return 8 * n / (setup.ranks if setup.stage else 1)  # two fp32 tensors


def _update(setup: Setup, n: int, own: int, sums: int, *, grown: bool) -> float:
    """Return the temporary bytes of an update on a CPU; ``grown``: with sums of gradients that are not held."""
    part, flat = n / setup.ranks, setup.flat and setup.stage == 0
    sum_bytes = part * sums if grown else 0.0
    if any(tensor.unit == "block" and tensor.of == "all" for tensor in optimizer_family(setup.optimizer).state):
        # Plain torch joins all tensors of a part in rows of blocks.
        beside = 4 * setup.averages + (own if own < 4 else 0) if flat else 0
        return sum_bytes + part * (4 + 2 + (sums if flat else 4) + beside)
    if flat:
        return n * 4.0 if sums < 4 else 0.0
    return sum_bytes + part * 4.0 if setup.stage in (1, 2) else 0.0
