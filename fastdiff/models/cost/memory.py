"""Memory of a rank in training: what fills it, errors that say it ran out, and flags with which the run would fit.

Weights, gradients, optimizer and averages follow from the run: bytes per parameter, divided as ZeRO divides them.
Activations are the rest of the measured peak; they include the buffers of the communication and gathered parameters.
"""

import errno
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from fastdiff.config.deepspeed import DsConfig, offloads_optimizer, zero_stage
from fastdiff.config.optimizers.registry import optimizer_family
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import micro_batches

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_ON_HOST = ("can't allocate memory", "not enough memory")
"""Messages of torch's allocator of host memory, as RuntimeErrors."""
_ON_GPU = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Messages of torch's allocator of GPU memory, of CUDA's runtime and libraries, and of Triton, as RuntimeErrors."""
RECOMPUTED = 0.25
"""Part of the activations that is left with --performance.recompute: the inputs of the blocks, and one whole block."""
_MOST = 3
"""Number of remedies in a message."""
_OTHER_OPTIMIZER = "--allow-change optim.name"
_OFFLOAD = "--deepspeed_config zero3_offload"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The properties of a run that decide its memory on one rank."""

    trained: int
    """Trained parameters of the whole network."""
    frozen_bytes: int
    """Bytes of the others."""
    buffer_bytes: int
    """Bytes of the buffers, among them the weights in 8 and 4 bits; ZeRO leaves them whole on every rank."""
    ranks: int
    stage: int
    flat: bool
    """Whether a run of stage 0 has the flat engine, which keeps each gradient beside the sums."""
    offload: bool
    """Whether masters, optimizer and averages are in host memory."""
    precision: str
    sums: str
    """Dtype in which gradients are added up."""
    optimizer: str
    """Name of its family."""
    averages: int
    micro: int
    """Samples of a micro-batch."""
    recompute: bool
    several: bool
    """Whether a step adds up several gradients."""
    in_matrices: int = 0
    """Of the trained parameters those in matrices that the network declares to the optimizer."""
    stored: float = 0.0
    """Share of the blocks that keep their activations although the others are recomputed."""
    together: int = 1
    """Samples of which a micro-batch has a multiple (``ObjectiveConfig.samples_together``)."""
    captured: bool = False
    """Whether CUDA graphs hold the passes of the flat engine."""
    in_order: bool = False
    """Whether the ranks exchange the gradient of every micro-batch: the flat engine needs room for two."""

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state per trained parameter."""
        return optimizer_family(self.optimizer).state_bytes(self.in_matrices / max(self.trained, 1))

    def static(self) -> dict[str, float]:
        """Return the bytes by kind that a step needs whatever its batch."""
        n, share = self.trained, 1 / self.ranks
        cut = {kind: share if self.stage >= stage else 1.0 for kind, stage in _CUT_FROM.items()}
        if self.in_order and self.stage == 1:
            cut["gradients"] = share
        own, sums = BYTES[self.precision], BYTES[self.sums if self.several else self.precision]
        beside = own * (1 + self.in_order * (2 if self.ranks > 1 else 1)) if self.flat and self.stage == 0 else 0
        on_device = 0 if self.offload else 1
        masters = 4 if self.stage or own < 4 else 0  # ZeRO has them also in fp32
        return {
            "weights": (n * own + self.frozen_bytes) * cut["weights"] + self.buffer_bytes,
            "gradients": n * (sums * cut["gradients"] + beside),
            "optimizer": on_device * n * (masters + self.state_bytes) * cut["optimizer"],
            "averages": on_device * n * 4 * self.averages * share,
        }


_CUT_FROM = {"optimizer": 1, "gradients": 2, "weights": 3}
"""ZeRO stage from which each rank has only its share."""


def frozen_bytes(model: nn.Module, precision: str) -> int:
    """Return the bytes of the parameters of a whole network that are not trained, once they are cast."""
    most = BYTES[precision]
    return sum(p.numel() * min(p.element_size(), most) for p in model.parameters() if not p.requires_grad)


def buffer_bytes(model: nn.Module) -> int:
    """Return the bytes of the buffers of a network, which no engine casts."""
    return sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


def exhausted(error: BaseException) -> Literal["host", "gpu"] | None:
    """Return whose memory ran out; None: neither's. torch.compile and other libraries may have wrapped the error."""
    chain: list[BaseException] = []
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop()
        if one is not None and one not in chain:
            chain.append(one)
            found += [one.__context__, one.__cause__]
    return next(filter(None, map(_exhausted, chain)), None)


def _exhausted(error: BaseException) -> Literal["host", "gpu"] | None:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if not isinstance(error, RuntimeError):
        return None
    if any(words in str(error) for words in _ON_HOST):
        return "host"
    on_gpu = isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _ON_GPU)
    return "gpu" if on_gpu else None


def setup_of(
    config: RunConfig, ds_config: DsConfig, ranks: int, *, flat: bool, trained: int, in_matrices: int,
    frozen_bytes: int, buffer_bytes: int, blocks: int,
) -> Setup:  # fmt: skip
    """Return the setup of a run; ``flat``: with the flat engine, ``blocks``: number of those of the network."""
    performance = config.performance
    return Setup(
        trained=trained,
        in_matrices=in_matrices,
        frozen_bytes=frozen_bytes,
        buffer_bytes=buffer_bytes,
        ranks=ranks,
        stage=zero_stage(ds_config),
        flat=flat,
        offload=offloads_optimizer(ds_config),
        precision=performance.precision,
        sums=performance.sums,
        optimizer=config.optim.name,
        averages=len(config.ema.rates) + len(config.ema.power_stds),
        micro=config.batch.per_rank(ranks),
        recompute=performance.recompute,
        several=ranks * config.batch.accumulation(ranks) > 1,
        stored=performance.stored_blocks / max(blocks, 1),
        together=config.objective.samples_together,
        captured=performance.cuda_graph,
        in_order=performance.in_order,
    )


def explain(setup: Setup, *, phase: str, device: str, activations: float, cache: int, room: int, cause: str) -> str:
    """Return the message about memory that did not suffice.

    Args:
        setup: of the run.
        phase: the part of a step that needed more.
        device: whose memory it is.
        activations: bytes of the measured peak beyond those of ``setup``.
        cache: bytes that the allocator holds beyond those in use.
        room: bytes that this rank can have.
        cause: message of the allocator.
    """
    parts = {**setup.static(), "activations": activations, "cache": float(cache)}
    filled = ", ".join(f"{kind} {_gib(size)}" for kind, size in parts.items())
    advice = " or ".join(
        f"{flag} ({_gib(size)} GiB{_restarts(flag)}{'' if size <= room else ', still too much'})"
        for flag, size in remedies(setup, activations, room)
    )
    return (
        f"out of memory in {phase} on {device}, which has {_gib(room)} GiB for this rank: {filled} GiB. "
        + (f"Predicted to fit: {advice}. {_RESUMES}" if advice else "No flag is left; use more ranks or larger GPUs")
        + f" ({_reason(cause)})"
    )


def explain_host(phase: str, *, online: bool, offload: bool, cause: str) -> str:
    """Return the message about host memory that did not suffice for a rank that trains on a GPU.

    Args:
        phase: the part of a step that needed more.
        online: whether the run decodes images in threads.
        offload: whether it keeps the optimizer in host memory.
        cause: message of the allocator.
    """
    flags = [*(["--data.workers"] if online else []), "--data.prefetch", "--output.pinned_gib"]
    others = ["start fewer ranks per node", *(["do not offload the optimizer"] if offload else [])]
    advice = " or ".join([f"lower {' or '.join(flags)}", *others])
    return f"out of host memory in {phase}: {advice}. {_RESUMES} ({_reason(cause)})"


_RESUMES = "The same command with such a flag resumes from the newest checkpoint"


def _reason(cause: str) -> str:
    return cause.strip().splitlines()[0] if cause.strip() else "no reason given"


def _restarts(flag: str) -> str:
    return ", starts its moments anew" if _OTHER_OPTIMIZER in flag else ""


def remedies(setup: Setup, activations: float, room: float) -> list[tuple[str, float]]:
    """Return the flags, each with the predicted bytes of the run with them, least change first.

    Only flags that fit into ``room``; if fewer than three do, the combinations that need the least.
    """
    single = list(_changes(setup, activations))
    fitting = [change for change in single if change[1] <= room]
    if len(fitting) < _MOST:
        named = {flag for flag, _ in fitting}
        fitting += sorted((c for c in (*_combined(setup, activations), *single) if c[0] not in named), key=_size)
    return fitting[:_MOST]


def _changes(setup: Setup, activations: float) -> Iterator[tuple[str, float]]:
    def total(changed: Setup, activations: float = activations) -> float:
        return sum(changed.static().values()) + activations

    half, least = half_of(setup.micro, setup.together), setup.together
    if half < setup.micro:
        yield f"--batch.micro {half}", total(replace(setup, several=True), activations * half / setup.micro)
    flag, part = _recomputation(setup)
    if part < 1:
        yield flag, total(setup, activations * part)
    if smaller := optimizer_family(setup.optimizer).smaller:
        yield _with_optimizer(smaller), total(replace(setup, optimizer=smaller))
    for stage in (2, 3):
        if setup.ranks > 1 and setup.stage < stage:
            changed = replace(setup, stage=stage, offload=False)
            yield f"--deepspeed_config zero{stage}", total(changed)
    if not setup.offload:
        yield _OFFLOAD, total(replace(setup, stage=3, offload=True))
    if least < half < setup.micro:
        yield f"--batch.micro {least}", total(replace(setup, several=True), activations * least / setup.micro)
    if setup.several and BYTES[setup.sums] > BYTES[setup.precision]:
        flags = f"--performance.grad_accum_dtype {setup.precision} --allow-change performance.grad_accum_dtype"
        yield flags, total(replace(setup, sums=setup.precision))


def _recomputation(setup: Setup) -> tuple[str, float]:
    """Return the flag that recomputes all blocks, and the part of the activations that it leaves; 1: the run has it."""
    if not setup.recompute:
        return "--performance.recompute", RECOMPUTED
    return "--performance.stored_blocks 0", RECOMPUTED / (RECOMPUTED + (1 - RECOMPUTED) * setup.stored)


def _with_optimizer(name: str) -> str:
    return f"--optim.name {name} {_OTHER_OPTIMIZER}"


def half_of(micro: int, together: int = 1) -> int:
    """Return the largest divisor of a micro-batch that is at most its half: the global batch stays divisible.

    It is a multiple of ``together``; itself, if there is none.
    """
    return next((size for size in micro_batches(micro, together) if size <= micro // 2), micro)


def _combined(setup: Setup, activations: float) -> Iterator[tuple[str, float]]:
    """Yield the strongest remedies together, without those that the run has."""
    flags: list[str] = []
    least = setup.together
    smaller = optimizer_family(setup.optimizer).smaller or setup.optimizer
    recompute, left = _recomputation(setup)
    for missing, flag, changed, part in (
        (setup.micro > least, f"--batch.micro {least}", {"several": True}, least / setup.micro),
        (left < 1, recompute, {}, left),
        (setup.optimizer != smaller, _with_optimizer(smaller), {"optimizer": smaller}, 1.0),
        (not (setup.offload and setup.stage == 3), _OFFLOAD, {"stage": 3, "offload": True}, 1.0),
    ):
        if not missing:
            continue
        flags.append(flag)
        setup, activations = replace(setup, **changed), activations * part  # type: ignore[arg-type]
        if len(flags) > 1:
            yield " ".join(flags), sum(setup.static().values()) + activations


def _size(change: tuple[str, float]) -> float:
    return change[1]


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
