"""Predicted seconds of an optimizer step: passes, messages, update, and the host that launches them.

This is the model of ``fastdiff plan``, ``bench scale --from`` and ``bench emit --budget``. A pass takes the time of its
kernels, row by row. The update moves the bytes that the engine counts per parameter. Messages overlap the last backward
pass of a step and take streaming multiprocessors (SMs) from it. The step is the slower of device and host.

An optimizer that treats matrices whole adds the products of the rank with the most of them, and the messages between
the owners and the other ranks, which overlap nothing; the host's launches of these products are not counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastdiff.planning.gpus import CPU, Gpus
from fastdiff.planning.kernels import Kernels
from fastdiff.planning.rates import FAST, MIDDLE, SLOW, Interval, Shares
from fastdiff.planning.scaling.communication import Compute, Message, step_seconds
from fastdiff.planning.scaling.owners import WholeWeights
from fastdiff.planning.scaling.zero import Zero

_CPU_LAUNCH_S = 40e-6
"""Seconds of an eager operation on a CPU beside its arithmetic; on a GPU the host's time is apart. Assumed."""
_STATE_BYTES = 8
"""Bytes of optimizer state per parameter in ``COPIES``: two fp32 moments."""
COPIES: dict[int, tuple[float, float]] = {0: (40.0, 8.0), 1: (16.0, 70.0), 2: (16.0, 70.0), 3: (23.0, 70.0)}
"""By stage, bytes per parameter that hooks, step and averages move under bf16 with AdamW, clipping and one average: on
every rank, and divided among the ranks.

Stage 0 is the flat engine, which ``ddp.json`` chooses: bf16 gradients into fp32 sums 6, norm 4, update 30 (gradient 4,
weights 8, moments 16, bf16 copy 2); the average 8. Stages 1 to 3 are fastdiff's shortened step of DeepSpeed 0.19.8,
counted on one rank: 58, of which 8 are clipping (``test_step_costs.py`` holds that), and 12 for
the average; their hooks were counted at stage 3 before gradients were left in place, so that 23 is an upper bound."""
_NCCL_SMS = 24 / 132
"""Share of the SMs that NCCL takes from the pass that it overlaps: one per channel, of which it opens 16 to 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one rank in an optimizer step."""

    kernels: tuple[Kernels, ...]
    """Of a forward and backward pass of one sample."""
    launches: int = 0
    """Operations of an eager pass, which cost time on a CPU."""
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
    state_bytes: float
    """Bytes of optimizer state per parameter."""
    recomputed: float
    """Share of the forward pass that runs again in the backward pass."""
    whole: WholeWeights | None = None
    """Weights that the optimizer updates whole; None: it has none."""
    captured: bool = False
    """Whether CUDA graphs hold passes and update: the host launches a few graphs, not every kernel."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured seconds per predicted ones; 1: as predicted."""

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
    device: Interval
    """Of the device alone."""
    host: Interval
    """Of the host alone; 0 on a CPU."""
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
    found = [_device(work, gpus, shares, factors) for shares in (FAST, MIDDLE, SLOW)]
    host = host_seconds(work) * (0.0 if gpus.kind is CPU else factors.host)
    device = Interval(*(seconds for seconds, *_ in found))
    whole = Interval(max(device.low, host.low), max(device.middle, host.middle), max(device.high, host.high))
    _, passes, update = found[1]
    return StepTime(whole, passes, update, device, host, "host" if host.middle > device.middle else "device")


def messages(work: Work, gpus: Gpus) -> list[Message]:
    """Return the messages of a step with one micro-batch."""
    if gpus.count == 1:
        return []
    found = work.zero.messages(work.parameters, work.width, gpus.count, work.sums, frozen=work.frozen)
    if work.whole is not None:
        _, sent = work.whole.spread(work.parameters, work.zero.slices(work.parameters, gpus.count))
        found.append(Message("all-to-all", sent // (gpus.count - 1)))
    return found


def pass_seconds(work: Work, gpus: Gpus, shares: Shares) -> float:
    """Return the seconds of one forward and backward pass of a micro-batch, without messages."""
    launches = work.launches * _CPU_LAUNCH_S if gpus.kind is CPU else 0.0
    return launches + work.micro * sum(row.seconds(gpus.kind, work.dtype, shares) for row in work.kernels)


def update_seconds(work: Work, gpus: Gpus, shares: Shares) -> float:
    """Return the seconds of hooks, norm, optimizer and averages."""
    ranks, stage = gpus.count, work.zero.stage
    whole, divided = COPIES[stage]
    saved = 2.0 * (_STATE_BYTES - work.state_bytes) / (ranks if stage else 1)  # read and written
    moved = sum(work.parameters) * (whole + divided / ranks - saved)
    return moved / (shares.update * gpus.kind.bandwidth) + _product_seconds(work, gpus, shares)


def _product_seconds(work: Work, gpus: Gpus, shares: Shares) -> float:
    """Return the seconds of the products of the optimizer, on the rank that has the most."""
    if work.whole is None:
        return 0.0
    flops, _ = work.whole.spread(work.parameters, work.zero.slices(work.parameters, gpus.count))
    dtype = work.whole.dtype if work.whole.dtype in gpus.kind.rates else "fp32"
    return Kernels(kind="matmul", operations=flops, dtype=dtype).seconds(gpus.kind, work.dtype, shares)


def _device(work: Work, gpus: Gpus, shares: Shares, factors: Factors) -> tuple[float, float, float]:
    """Return the seconds of the device in a step, and of its passes and its update alone."""
    one = factors.passes * pass_seconds(work, gpus, shares)
    update = factors.update * update_seconds(work, gpus, shares)
    forward = one / (3 + work.recomputed)
    compute, sent = Compute(forward, one - forward), messages(work, gpus)
    overlap, cost = work.zero.overlap, _cost(gpus)
    last = step_seconds(compute, sent, cost, overlap=overlap)
    last += _NCCL_SMS * _overlapped(compute, sent, cost) if overlap else 0.0
    before = step_seconds(compute, repeated(sent, work.zero), cost, overlap=overlap)
    return last + update + (work.accumulation - 1) * before, work.accumulation * one, update


def _overlapped(compute: Compute, sent: Sequence[Message], cost: Callable[[Message], float]) -> float:
    """Return the seconds in which messages and a pass run at once, at most the pass."""
    passes = {"forward": compute.forward, "backward": compute.backward}
    return sum(min(seconds, sum(cost(m) for m in sent if m.part == part)) for part, seconds in passes.items())


def _cost(gpus: Gpus) -> Callable[[Message], float]:
    cluster = gpus.cluster
    return lambda message: cluster.seconds(message.kind, message.bytes, gpus.count)


def repeated(messages: Sequence[Message], zero: Zero) -> list[Message]:
    """Return the messages of a micro-batch that is not the last: ZeRO-2 and 3 send gradients after each.

    So do all stages if they add them up in order.
    """
    stage = zero.stage
    if zero.in_order:
        return [message for message in messages if message.part != "step"]
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
    tensors = 0 if work.captured else len(work.parameters) + len(work.frozen)  # each has its kernels in a pass
    once, more = HOSTS[work.zero.stage], HOSTS[3 if work.zero.stage == 3 else 0]
    slow, middle, fast = (
        once.seconds(tensors, speed) + (work.accumulation - 1) * more.seconds(tensors, speed) for speed in SPEEDS
    )
    return Interval(fast, middle, slow)


SPEEDS = (1.4, 1.7, 2.0)
"""How many times faster a processor beside a GPU is than that of ``HOSTS``: high, middle and low estimate of its time.
Assumed; nothing was measured. A step measured on a GPU bounds it from below (``fastdiff_bench.scaling.projection``)."""


@dataclass(frozen=True, slots=True)
class Host:
    """Host time of a step at one ZeRO stage."""

    fixed: float
    """Seconds."""
    per_tensor: float
    """Seconds per trained parameter tensor."""

    def seconds(self, tensors: int, speed: float = 1.0) -> float:
        """Return the seconds of a step, on a processor ``speed`` times as fast as the measured one."""
        return (self.fixed + tensors * self.per_tensor) / speed


HOSTS = {
    0: Host(2.414e-3, 0.0810e-3),
    1: Host(5.231e-3, 0.1128e-3),
    2: Host(3.824e-3, 0.1199e-3),
    3: Host(6.343e-3, 0.1902e-3),
}
"""By ZeRO stage, with eager blocks on two cores of an AMD EPYC: ``bench/results/cpu-2-cores/2026-11-28_host``. An
upper bound: compiled blocks launch less."""
