"""How fast the nodes exchange data in pairs, over the backend that the training will use.

Every node meets others in the rounds of a round-robin tournament (the circle method): all pairs of a round exchange at
once, as in an all-reduce over all nodes. A process per device, which takes its process groups with it when it ends:

    python -m fastdiff.cluster.preflight.bandwidth HOST PORT NODE NODES DEVICE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from tempfile import TemporaryFile
from typing import IO

import torch
import torch.distributed
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fastdiff.cluster.supervisor.ranks import kill_group, spawn

ROUNDS = 16
"""At most so many, spread evenly over the tournament."""
_BYTES = 16 * 2**20
_MEASURED_S = 0.3
_TURNS = 3
"""The fastest counts: what else runs on a node can only slow one down."""
_PAIR_S = 20.0
"""An exchange that takes longer counts as failed."""
_FAILURES = 2
"""After so many in a row a node stops, so that the others need not wait for it."""
_HERE, _GONE = "here", "gone"


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-reduce of two nodes."""

    device: int
    partner: int
    bytes_per_s: float
    """In each direction; 0: it failed."""
    failure: str = ""


def measure(store: TCPStore, node: int, nodes: int, ranks_per_node: int, deadline: float) -> list[Exchange]:
    """Return this node's exchanges; called by all nodes at about the same time.

    Args:
        store: of the supervisors.
        node: number of this node.
        nodes: how many there are.
        ranks_per_node: with CUDA, each of them has a device of its own, which is measured.
        deadline: of the monotonic clock; what still runs then is ended.
    """
    devices = min(torch.cuda.device_count(), ranks_per_node) if torch.cuda.is_available() else 1
    arguments = [store.host, str(store.port), str(node), str(nodes)]
    running = [_Process.start(device, arguments) for device in range(devices)]
    keys = _keys(store)
    try:
        waiting = list(running)
        while waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            for process in [process for process in waiting if process.child.poll() is not None]:
                waiting.remove(process)
                if process.child.returncode:
                    _leave(keys, node, process.device, range(len(pairings(nodes))))
    finally:
        for process in running:
            if process.child.poll() is None:
                kill_group(process.child)
            process.child.wait()
    return [exchange for process in running for exchange in process.exchanges()]


@dataclass(frozen=True, slots=True)
class _Process:
    device: int
    child: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    @classmethod
    def start(cls, device: int, arguments: Sequence[str]) -> _Process:
        output, errors = TemporaryFile(), TemporaryFile()  # noqa: SIM115 (closed when they are read)
        command = [sys.executable, "-m", "fastdiff.cluster.preflight.bandwidth", *arguments, str(device)]
        # NCCL then raises in the process that waits, as gloo does, and does not end it before the other exchanges.
        environment = os.environ | {"TORCH_NCCL_BLOCKING_WAIT": "1"}
        child = spawn(command, environment, stdout=output, stderr=errors)
        return cls(device, child, output, errors)

    def exchanges(self) -> Iterator[Exchange]:
        """Yield what it measured; one that failed, if it ended otherwise than it should."""
        with self.output, self.errors:
            self.output.seek(0)
            yield from (Exchange(**json.loads(line)) for line in self.output.read().splitlines())
            if self.child.returncode:
                self.errors.seek(0)
                last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
                why = f"the process that measures ended with {self.child.returncode}"
                yield Exchange(self.device, -1, 0.0, ": ".join([why, *last]))


def pairings(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round: in ``nodes - 1`` rounds (``nodes``, if odd) each meets each once.

    Of more than ``ROUNDS`` rounds, that many are chosen.
    """
    even = nodes + nodes % 2
    circle = list(range(1, even))
    rounds = []
    for turn in range(even - 1):
        order = [0, *circle[turn:], *circle[:turn]]
        pairs = [(order[place], order[-1 - place]) for place in range(even // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < nodes])
    count = min(len(rounds), ROUNDS)
    return [rounds[number * len(rounds) // count] for number in range(count)]


def _tournament(store: Store, node: int, nodes: int, device: int) -> Iterator[Exchange]:
    failures = 0
    rounds = pairings(nodes)
    for number, pairs in enumerate(rounds):
        pair = next((pair for pair in pairs if node in pair), None)
        if pair is None:
            continue
        partner = sum(pair) - node
        if failures == _FAILURES:
            _leave(store, node, device, range(number, len(rounds)))
            return
        store.set(_meeting(number, node, device), _HERE)
        if store.get(_meeting(number, partner, device)).decode() == _GONE:
            yield Exchange(device, partner, 0.0, f"node {partner} gave up")
            continue
        try:
            group = PrefixStore(f"{number}/{pair[0]}-{pair[1]}/{device}", store)
            yield Exchange(device, partner, _exchange(group, pair.index(node), device))
            failures = 0
        except (DistError, RuntimeError) as error:
            failures += 1
            yield Exchange(device, partner, 0.0, f"with node {partner}: {str(error).splitlines()[0]}")


def _exchange(store: Store, rank: int, device: int) -> float:
    """Return the bytes per second, in each direction, of an all-reduce of two ranks."""
    on_cuda = torch.cuda.is_available()
    torch.distributed.init_process_group(
        "nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=_PAIR_S)
    )
    try:
        place = torch.device("cuda", device) if on_cuda else torch.device("cpu")
        tensor = torch.zeros(_BYTES // 4, device=place)
        _timed(tensor, 1)  # connects
        times = torch.tensor([_timed(tensor, 1)], device=place)
        torch.distributed.all_reduce(times, torch.distributed.ReduceOp.MAX)
        count = max(1, min(50, round(_MEASURED_S / _TURNS / times.item())))
        return _BYTES * count / min(_timed(tensor, count) for _ in range(_TURNS))
    finally:
        torch.distributed.destroy_process_group()


def _timed(tensor: torch.Tensor, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        torch.distributed.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - began


def _keys(store: Store) -> Store:
    return PrefixStore("preflight/bandwidth", store)


def _meeting(number: int, node: int, device: int) -> str:
    """Key of whether a device of a node takes part in a round."""
    return f"meet/{number}/{node}/{device}"


def _leave(store: Store, node: int, device: int, rounds: Sequence[int]) -> None:
    """Tell the partners of these rounds not to wait."""
    for number in rounds:
        store.set(_meeting(number, node, device), _GONE)


def main(arguments: Sequence[str]) -> None:
    """Take part in the tournament with one device; print one exchange per line."""
    host, port, node, nodes, device = arguments
    if torch.cuda.is_available():
        torch.cuda.set_device(int(device))
    else:
        torch.set_num_threads(1)
    # A partner may be late by the failures of all rounds before.
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_PAIR_S * (ROUNDS + 1)))
    for exchange in _tournament(_keys(store), int(node), int(nodes), int(device)):
        sys.stdout.write(json.dumps(asdict(exchange)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
