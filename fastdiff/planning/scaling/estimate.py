"""Prediction of a step: the slower of host and device, with what the messages alone leave out.

Besides computation and exposed messages, the device's time has the copies of the engine's step, and the share of the
streaming multiprocessors (SMs) that NCCL occupies while messages overlap computation. Each uncertain figure has a low,
a middle and a high estimate, and so has the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastdiff.planning.scaling.communication import Compute, Message, step_seconds
from fastdiff.planning.scaling.host import SPEEDS, Host

COPIES: dict[int, tuple[float, float]] = {0: (40.0, 8.0), 1: (16.0, 70.0), 2: (16.0, 70.0), 3: (23.0, 70.0)}
"""By stage, bytes per parameter that hooks, step and averages move under bf16 with AdamW, clipping and one average: on
every rank, and divided among the ranks.

Stage 0 is the flat engine, which ``ddp.json`` chooses: bf16 gradients into fp32 sums 6, norm 4, update 30 (gradient 4,
weights 8, moments 16, bf16 copy 2); the average 8. Stages 1 to 3 are fastdiff's shortened step of DeepSpeed 0.19.8,
counted on one rank: 58, of which 8 are clipping (``test_step_costs.py`` holds that), and 12 for
the average; their hooks were counted at stage 3 before gradients were left in place, so that 23 is an upper bound."""
LEAST_COPIES = 38.0
"""Bytes per parameter of an update that reads and writes everything once; part of a step of unknown origin."""
H200_COPIES = (4.2e12, 4.0e12, 3.6e12)
"""Bytes per second of an H200's memory in such copies (its data sheet: 4.8e12): low, middle and high time."""
_SMS, _NCCL_SMS = 132, (16, 24, 32)
"""SMs of an H100 or H200; SMs that NCCL occupies, one per channel, of which it opens up to 32 (NCCL_MAX_CTAS)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Low, middle and high estimate in seconds."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted step."""

    device: Bounds
    host: Bounds | None
    """None: not modelled."""

    @property
    def step(self) -> Bounds:
        """The slower of both."""
        if self.host is None:
            return self.device
        return Bounds(
            max(self.device.low, self.host.low),
            max(self.device.middle, self.host.middle),
            max(self.device.high, self.host.high),
        )

    @property
    def limit(self) -> str:
        """``host`` or ``device``, whichever is slower in the middle."""
        return "host" if self.host is not None and self.host.middle > self.device.middle else "device"


def estimate(
    compute: Compute,
    messages: Sequence[Message],
    cost: Callable[[Message], float],
    ranks: int,
    *,
    overlap: bool,
    copied: tuple[int, int] | None = None,
    host: tuple[Host, int] | None = None,
    least_speed: float = 0.0,
    rates: Sequence[float] = H200_COPIES,
) -> Estimate:
    """Predict the step of ``ranks`` ranks.

    Args:
        compute: of one rank.
        messages: of one step, in order.
        cost: returns the seconds of a message.
        ranks: number of ranks.
        overlap: whether communication overlaps computation.
        copied: stage, and number of parameters, of the engine's copies; None: ``compute`` has them.
        host: host time of the stage and number of parameter tensors; None: only the device limits.
        least_speed: how many times faster than that of ``host`` the processor is at least, by a measured step.
        rates: bytes per second of the copies: of the low, middle and high time.
    """
    base = step_seconds(compute, messages, cost, ranks, overlap=overlap)
    beside = _overlapped(compute, messages, cost) if overlap else 0.0
    extra = 0.0 if copied is None else copied[1] * (copied_bytes(copied[0], ranks) - LEAST_COPIES)
    taken = [sms / _SMS * beside for sms in _NCCL_SMS]
    # Where sharding saves copies, a slower memory saves more.
    device = sorted(base + more + extra / rate for more, rate in zip(taken, rates, strict=True))
    speeds = [max(speed, least_speed) for speed in reversed(SPEEDS)]
    found = None if host is None else [host[0].seconds(host[1], speed) for speed in speeds]
    return Estimate(Bounds(*device), None if found is None else Bounds(*found))


def copied_bytes(stage: int, ranks: int) -> float:
    """Return the bytes per parameter that the engine of a stage moves in a step."""
    whole, divided = COPIES[stage]
    return whole + divided / ranks


def _overlapped(compute: Compute, messages: Sequence[Message], cost: Callable[[Message], float]) -> float:
    """Return the seconds in which messages and a pass run at once, at most the pass."""
    passes: Mapping[str, float] = {"forward": compute.forward, "backward": compute.backward}
    return sum(min(seconds, sum(cost(m) for m in messages if m.part == part)) for part, seconds in passes.items())
