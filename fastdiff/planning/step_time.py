"""Predicted seconds of an optimizer step: passes, messages, update, and the host that launches them.

A pass takes the time of its operations at the rates of the GPU and that of the bytes that its other kernels move. The
update moves the bytes that the engine counts per parameter. Messages overlap the last backward pass of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastdiff.models.cost.traced import Traced
from fastdiff.planning.gpus import CPU, Gpus
from fastdiff.planning.rates import FUSED, LEVELS, Interval, Shares
from fastdiff.planning.scaling.communication import Compute, Message, step_seconds
from fastdiff.planning.scaling.estimate import copied_bytes, estimate
from fastdiff.planning.scaling.host import HOSTS, SPEEDS
from fastdiff.planning.scaling.zero import Zero

_CPU_LAUNCH_S = 40e-6
"""Seconds of an eager operation on a CPU beside its arithmetic; on a GPU the host's time is apart. Assumed."""
_STATE_BYTES = 8
"""Bytes of optimizer state per parameter in ``copied_bytes``: two fp32 moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one rank in an optimizer step."""

    traced: Traced
    """Of the network, with recomputation if the run has it."""
    fused: bool
    """Whether the blocks are compiled, so that fewer bytes move."""
    dtype: str
    """Key of the GPU's rates: fp32, tf32, bf16 or fp16."""
    micro: int
    accumulation: int
    zero: Zero
    parameters: tuple[int, ...]
    """Elements of each trained parameter."""
    frozen: tuple[int, ...]
    """Elements of each frozen one, which ZeRO-3 gathers too."""
    width: int
    """Bytes per element of the network's weights."""
    sums: int
    """Bytes per element of the gradients when they are added up."""
    state_bytes: int
    """Bytes of optimizer state per parameter."""
    recompute: bool


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured seconds per predicted ones; 1: as assumed."""

    passes: float = 1.0
    update: float = 1.0
    host: float = 1.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step."""

    whole: Interval
    passes: float
    """Of it the forward and backward passes of all micro-batches, without messages; middle."""
    update: float
    """Of it the optimizer and the averages; middle."""
    limit: str
    """``host`` or ``device``: whichever is slower in the middle."""


def step_time(work: Work, gpus: Gpus, factors: Factors | None = None) -> StepTime:
    """Predict a step.

    Args:
        work: of each rank.
        gpus: one per rank.
        factors: by which the prediction is corrected.
    """
    factors = factors or Factors()
    found = [_device(work, gpus, shares, factors) for shares in LEVELS]
    host = host_seconds(work) * (0.0 if gpus.kind is CPU else factors.host)
    device = Interval(*(seconds for seconds, *_ in found))
    whole = Interval(*(max(pair) for pair in zip(_sides(device), _sides(host), strict=True)))
    _, passes, update = found[1]
    return StepTime(whole, passes, update, "host" if host.middle > device.middle else "device")


def _sides(interval: Interval) -> tuple[float, float, float]:
    return interval.low, interval.middle, interval.high


def pass_seconds(work: Work, gpus: Gpus, shares: Shares) -> float:
    """Return the seconds of one forward and backward pass of a micro-batch, without messages."""
    traced, kind = work.traced, gpus.kind
    rate = kind.rates[work.dtype]
    moved = FUSED * traced.saved if work.fused and not work.recompute else traced.bytes
    products = traced.matmul / shares.matmul + traced.convolution / shares.convolution
    launches = traced.launches * _CPU_LAUNCH_S if kind is CPU else 0.0
    return launches + work.micro * (
        (products + traced.attention / shares.attention) / rate + moved / (shares.bandwidth * kind.bandwidth)
    )


def _device(work: Work, gpus: Gpus, shares: Shares, factors: Factors) -> tuple[float, float, float]:
    """Return the seconds of the device in a step, and of its passes and its update alone."""
    one = factors.passes * pass_seconds(work, gpus, shares)
    bandwidth, ranks = shares.bandwidth * gpus.kind.bandwidth, gpus.count
    saved = 2.0 * (_STATE_BYTES - work.state_bytes) / (ranks if work.zero.stage else 1)  # read and written
    moved = copied_bytes(work.zero.stage, ranks) - saved
    update = factors.update * sum(work.parameters) * moved / bandwidth
    forward = one / (4 if work.recompute else 3)
    messages = []
    if ranks > 1:
        messages = work.zero.messages(work.parameters, work.width, ranks, work.sums, frozen=work.frozen)
    cost = _cost(gpus)
    last = estimate(
        Compute(forward, one - forward, update), messages, cost, ranks, overlap=work.zero.overlap
    ).device.middle
    repeated = _repeated(messages, work.zero.stage)
    before = step_seconds(Compute(forward, one - forward), repeated, cost, ranks, overlap=work.zero.overlap)
    return last + (work.accumulation - 1) * before, work.accumulation * one, update


def _cost(gpus: Gpus) -> Callable[[Message], float]:
    cluster = gpus.cluster
    return lambda message: cluster.seconds(message.kind, message.bytes, gpus.count)


def _repeated(messages: Sequence[Message], stage: int) -> list[Message]:
    """Return the messages of a micro-batch that is not the last: ZeRO-2 and 3 send gradients after each."""
    if stage < 2:
        return []
    kinds = {"all-reduce", "reduce-scatter"} if stage == 2 else {"all-gather", "reduce-scatter"}
    small = 64  # the norm
    return [
        message if message.part != "step" else replace(message, part="backward")
        for message in messages
        if message.kind in kinds and message.bytes > small and (message.part != "step" or stage == 2)
    ]


def host_seconds(work: Work) -> Interval:
    """Return the seconds of the host in a step; a pass without an update is taken for a step of stage 0."""
    tensors = len(work.parameters) + len(work.frozen)  # each has its kernels in a pass
    once, more = HOSTS[work.zero.stage], HOSTS[3 if work.zero.stage == 3 else 0]
    slow, middle, fast = (
        once.seconds(tensors, speed) + (work.accumulation - 1) * more.seconds(tensors, speed) for speed in SPEEDS
    )
    return Interval(fast, middle, slow)
