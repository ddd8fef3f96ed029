"""Model of the communication between data-parallel ranks and of its time; arithmetic alone.

A collective over ``W`` ranks on a vector of ``n`` bytes costs ``alpha`` seconds per message and ``beta`` seconds per
byte that a rank sends. In a ring every rank sends ``(W - 1) / W * n`` bytes in ``W - 1`` messages for a reduce-scatter
or an all-gather, and both for an all-reduce. No algorithm sends fewer bytes (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005).

In an all-to-all every rank sends ``n / W`` bytes to each other one.

Between nodes every GPU has a link of its own. A collective then consists of one within the node and one between GPUs of
equal number in all nodes, each on the share ``n / g`` of one of ``g`` GPUs. An all-reduce between nodes uses the ring
or, with fewer sequential messages, two trees (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", 2009; used by NCCL since 2.4), whichever is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Part = Literal["forward", "backward", "step"]
"""Time of a message: during the forward pass, during the backward pass, or without concurrent computation."""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective."""

    kind: str
    """``all-reduce``, ``reduce-scatter``, ``all-gather`` or ``all-to-all``."""
    bytes: int
    """Size of the whole vector, which every rank has before or after it."""
    part: Part = "step"


def sent(kind: str, size: int, ranks: int) -> float:
    """Return the least bytes that a rank sends, averaged over the ranks, for a vector (or a part) of ``size`` bytes."""
    return (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks * size


@dataclass(frozen=True, slots=True)
class Link:
    """Link between two GPUs."""

    latency: float
    """Seconds per message."""
    bandwidth: float
    """Bytes per second in one direction."""

    def ring(self, kind: str, size: float, ranks: int) -> float:
        """Return the seconds of a collective along a ring of ``ranks`` such links."""
        rounds = (2 if kind == "all-reduce" else 1) * (ranks - 1)
        return rounds * (self.latency + size / ranks / self.bandwidth)

    def trees(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-reduce up and down two trees, each with half of the vector."""
        return 2 * (math.ceil(math.log2(ranks)) * self.latency + size / self.bandwidth)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of several GPUs."""

    per_node: int
    inside: Link
    """Between the GPUs of a node."""
    between: Link
    """From a GPU to another node."""

    def seconds(self, kind: str, size: float, ranks: int) -> float:
        """Return the seconds of one collective; ``ranks`` fill whole nodes, or lie within one."""
        near = min(ranks, self.per_node)
        if kind == "all-to-all":  # one message to each other rank
            part = size / ranks
            within, without = ((link.latency + part / link.bandwidth) for link in (self.inside, self.between))
            return (near - 1) * within + (ranks - near) * without
        nodes = math.ceil(ranks / near)
        share = size / near
        far = self.between.ring(kind, share, nodes)
        if kind == "all-reduce":
            far = min(far, self.between.trees(share, nodes))
        return self.inside.ring(kind, size, near) + far


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of a step of a single rank."""

    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward


def step_seconds(
    compute: Compute, messages: Sequence[Message], cost: Callable[[Message], float], *, overlap: bool
) -> float:
    """Return the seconds of a step of ranks that each compute as fast as a single one.

    Args:
        compute: of one rank.
        messages: of one step, in order.
        cost: returns the seconds of a message.
        overlap: whether communication overlaps computation.
    """
    total = compute.seconds
    if not overlap:
        return total + sum(map(cost, messages))
    parts = {part: [message for message in messages if message.part == part] for part in ("forward", "backward")}
    total += _exposed_forward(compute.forward, parts["forward"], cost)
    total += _exposed_backward(compute.backward, parts["backward"], cost)
    return total + sum(cost(message) for message in messages if message.part == "step")


def _exposed_forward(seconds: float, messages: Sequence[Message], cost: Callable[[Message], float]) -> float:
    """Return the delay of a pass by gathers that it needs in order; gathers are prefetched without limit."""
    total = sum(message.bytes for message in messages)
    arrived = computed = 0.0
    for message in messages:
        arrived += cost(message)
        computed = max(computed, arrived) + seconds * message.bytes / total
    return computed - seconds if messages else 0.0


def _exposed_backward(seconds: float, messages: Sequence[Message], cost: Callable[[Message], float]) -> float:
    """Return the communication time that exceeds a pass which fills the buckets in order, at an even pace.

    Gathers can be sent from the start, and come first.
    """
    total = sum(message.bytes for message in messages if message.kind != "all-gather")
    filled, finished = 0, 0.0
    for message in sorted(messages, key=lambda message: message.kind != "all-gather"):
        filled += message.bytes if message.kind != "all-gather" else 0
        ready = seconds * filled / total if filled else 0.0
        finished = max(finished, ready) + cost(message)
    return max(finished - seconds, 0.0)
