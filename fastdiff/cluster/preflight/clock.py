"""Clock offsets of the nodes, measured through the store of their supervisors."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from fastdiff.cluster.supervisor.waiting import value_of

_ASKS = 5
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Offset:
    """The offset of a node's clock from the clock of node 0."""

    seconds: float
    """Positive if the clock is ahead."""
    error_s: float
    """Bound of the error: half of the round trip."""


def measure(keys: Store, node: int, nodes: int, now: Callable[[], float]) -> Offset | None:
    """Return the offset of this node's clock; called by all nodes.

    Each node asks node 0 for the time five times; the fastest answer counts (Cristian's algorithm).

    Args:
        keys: store of the nodes.
        node: number of this node.
        nodes: number of nodes.
        now: clock of this node, in seconds since 1970.

    Returns:
        None if node 0 did not answer.
    """
    if node == 0:
        for other in range(1, nodes):
            _answer(keys, other, now)
        return Offset(0.0, 0.0)
    try:
        return min((_ask(keys, node, nodes, count, now) for count in range(_ASKS)), key=lambda found: found.error_s)
    except DistStoreError:
        return None


def _ask(keys: Store, node: int, nodes: int, count: int, now: Callable[[], float]) -> Offset:
    before = now()
    began = time.monotonic()
    keys.set(f"clock/ask/{node}/{count}", "")
    # Node 0 serves the nodes one by one, and waits for each that is gone.
    answer = float(value_of(keys, f"clock/answer/{node}/{count}", began + _PATIENCE_S * nodes))
    round_trip = time.monotonic() - began
    return Offset(before + round_trip / 2 - answer, round_trip / 2)


def _answer(keys: Store, node: int, now: Callable[[], float]) -> None:
    for count in range(_ASKS):
        try:
            value_of(keys, f"clock/ask/{node}/{count}", time.monotonic() + _PATIENCE_S)
        except DistStoreError:
            return  # its supervisor ended; its missing report is found later
        keys.set(f"clock/answer/{node}/{count}", repr(now()))
