"""A model of what data-parallel ranks say to one another, and of how long it takes; arithmetic alone.

A collective over ``W`` ranks on a vector of ``n`` bytes costs ``alpha`` seconds per message and ``beta`` seconds per
byte that a rank sends. In a ring every rank sends ``(W - 1) / W * n`` bytes in ``W - 1`` messages for a reduce-scatter
or an all-gather, and both for an all-reduce, which no algorithm undercuts (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005).

Between nodes every GPU has a link of its own. A collective then is one within the node and one between the GPUs of
the same number in all nodes, on the share ``n / g`` of one of ``g`` GPUs. Between nodes an all-reduce goes along the
ring or, with fewer messages in sequence, along two trees (Sanders, Speck and Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", 2009; what NCCL does since 2.4), whichever is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Part = Literal["forward", "backward", "step"]
"""When a message is sent: beside the forward pass, beside the backward pass, or while nothing is computed."""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective."""

    kind: str
    """``all-reduce``, ``reduce-scatter`` or ``all-gather``."""
    bytes: int
    """Of the whole vector, which every rank has before it or after it."""
    part: Part = "step"


def sent(kind: str, size: int, ranks: int) -> float:
    """Bytes that a rank sends at least, on the average over the ranks, for a vector (or a part) of ``size`` bytes."""
    return (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks * size


@dataclass(frozen=True, slots=True)
class Link:
    """How a GPU reaches another."""

    latency: float
    """Seconds per message."""
    bandwidth: float
    """Bytes per second in one direction."""

    def ring(self, kind: str, size: float, ranks: int) -> float:
        """Seconds of a collective along a ring of ``ranks`` such links."""
        rounds = (2 if kind == "all-reduce" else 1) * (ranks - 1)
        return rounds * (self.latency + size / ranks / self.bandwidth)

    def trees(self, size: float, ranks: int) -> float:
        """Seconds of an all-reduce up and down two trees, each with half of the vector."""
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
        """Of one collective; ``ranks`` fill whole nodes, or are within one."""
        near = min(ranks, self.per_node)
        nodes = math.ceil(ranks / near)
        share = size / near
        far = self.between.ring(kind, share, nodes)
        if kind == "all-reduce":
            far = min(far, self.between.trees(share, nodes))
        return self.inside.ring(kind, size, near) + far


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a collective of one kind over a fixed number of ranks: ``latency + per_byte * bytes``."""

    latency: float
    per_byte: float
    residual: float
    """Root mean square of the relative deviations of what was measured."""

    def seconds(self, size: float) -> float:
        """For a vector of ``size`` bytes."""
        return self.latency + self.per_byte * size


def fit(points: Sequence[tuple[int, float]]) -> Line:
    """The line through (bytes, seconds) whose relative deviations have the least squares; neither term is negative."""
    size, seconds = np.array(points, dtype=np.float64).T
    columns = np.stack([1 / seconds, size / seconds], axis=1)
    found = np.linalg.lstsq(columns, np.ones(len(size)), rcond=None)[0]
    if found.min() < 0:
        kept = int(found.argmax())
        found = np.zeros(2)
        found[kept] = columns[:, kept].sum() / (columns[:, kept] ** 2).sum()
    residual = float(np.sqrt(np.mean((columns @ found - 1) ** 2)))
    return Line(float(found[0]), float(found[1]), residual)


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of a step of one rank alone."""

    forward: float
    backward: float
    rest: float = 0.0
    """Data, objective and all else that does not depend on the number of ranks."""
    sharded: float = 0.0
    """Optimizer and EMA, as far as each of ``W`` ranks does one part of ``W``."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward + self.backward + self.rest + self.sharded

    @classmethod
    def of(cls, seconds: float, phases: Mapping[str, float], shards: Sequence[str]) -> Compute:
        """From the time of a step and of its phases; without these, a backward pass takes twice a forward pass.

        Args:
            seconds: of the step.
            phases: seconds by name, as in ``bench step``; or none.
            shards: the phases that each rank does its part of.
        """
        if not {"forward", "backward"} <= phases.keys():
            return cls(seconds / 3, 2 * seconds / 3)
        sharded = sum(phases.get(name, 0.0) for name in shards)
        rest = seconds - phases["forward"] - phases["backward"] - sharded
        return cls(phases["forward"], phases["backward"], max(rest, 0.0), sharded)


def step_seconds(
    compute: Compute, messages: Sequence[Message], cost: Callable[[Message], float], ranks: int, *, overlap: bool
) -> float:
    """Seconds of a step of ``ranks`` ranks that all compute as fast as one.

    Args:
        compute: of one rank.
        messages: of one step, in order.
        cost: seconds of one of them.
        ranks: how many.
        overlap: whether the network works while the ranks compute.
    """
    total = compute.forward + compute.backward + compute.rest + compute.sharded / ranks
    if not overlap:
        return total + sum(map(cost, messages))
    parts = {part: [message for message in messages if message.part == part] for part in ("forward", "backward")}
    total += _exposed_forward(compute.forward, parts["forward"], cost)
    total += _exposed_backward(compute.backward, parts["backward"], cost)
    return total + sum(cost(message) for message in messages if message.part == "step")


def _exposed_forward(seconds: float, messages: Sequence[Message], cost: Callable[[Message], float]) -> float:
    """By how much gathers delay a pass that needs each before its share of the work; they go ahead as they can."""
    total = sum(message.bytes for message in messages)
    arrived = computed = 0.0
    for message in messages:
        arrived += cost(message)
        computed = max(computed, arrived) + seconds * message.bytes / total
    return computed - seconds if messages else 0.0


def _exposed_backward(seconds: float, messages: Sequence[Message], cost: Callable[[Message], float]) -> float:
    """By how much the network is behind a pass that fills one bucket after the other, at an even pace.

    What is gathered can be sent from the start, and comes first.
    """
    total = sum(message.bytes for message in messages if message.kind != "all-gather")
    filled, finished = 0, 0.0
    for message in sorted(messages, key=lambda message: message.kind != "all-gather"):
        filled += message.bytes if message.kind != "all-gather" else 0
        ready = seconds * filled / total if filled else 0.0
        finished = max(finished, ready) + cost(message)
    return max(finished - seconds, 0.0)
