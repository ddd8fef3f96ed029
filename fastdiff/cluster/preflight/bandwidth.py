"""Bandwidth between pairs of nodes, over the backend of the training.

Nodes are paired in the rounds of a round-robin tournament (the circle method). All pairs of a round run at once, as in
an all-reduce over all nodes. One process per device measures, so that its process groups end with it:

    python -m fastdiff.cluster.preflight.bandwidth HOST PORT NODE NODES DEVICE BACKEND
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
"""Largest number of rounds, spread evenly over the tournament."""
_BYTES = 16 * 2**20
_MEASURED_S = 0.3
_TURNS = 3
"""Repeats; the fastest counts, because other load on a node only slows them down."""
_PAIR_S = 20.0
"""An exchange that takes longer counts as failed."""
_FAILURES = 2
"""Failures in a row after which a node gives up, so that no other node waits for it."""
_GONE = "gone"


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-reduce between two nodes."""

    device: int
    partner: int
    bytes_per_s: float
    """Bandwidth in each direction; 0: the exchange failed."""
    failure: str = ""


def measure(
    store: TCPStore, node: int, nodes: int, gpus: int | None, ranks_per_node: int, deadline: float
) -> list[Exchange]:
    """Return this node's exchanges; called by all nodes at about the same time.

    Args:
        store: store of the supervisors.
        node: number of this node.
        nodes: number of nodes.
        gpus: number of GPUs to measure over NCCL; 0: one process measures over gloo; None: this node has a problem with
            its devices, and takes no part.
        ranks_per_node: largest number of GPUs that any node measures.
        deadline: time of the monotonic clock at which unfinished measurements are ended.
    """
    arguments, keys, rounds = [store.host, str(store.port), str(node), str(nodes)], _keys(store), pairings(nodes)
    devices = 0 if gpus is None else max(1, gpus)
    for device in range(devices, ranks_per_node):
        _leave(keys, node, device, range(len(rounds)))
    running = [_Process.start(device, arguments, "nccl" if gpus else "gloo") for device in range(devices)]
    try:
        waiting = list(running)
        while waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            for process in [process for process in waiting if process.child.poll() is not None]:
                waiting.remove(process)
                if process.child.returncode:
                    _leave(keys, node, process.device, range(len(rounds)))
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
    def start(cls, device: int, arguments: Sequence[str], backend: str) -> _Process:
        output, errors = TemporaryFile(), TemporaryFile()  # noqa: SIM115 (closed once read)
        command = [sys.executable, "-m", "fastdiff.cluster.preflight.bandwidth", *arguments, str(device), backend]
        # With it NCCL raises in the waiting process, as gloo does, instead of ending it before the next exchange.
        environment = os.environ | {"TORCH_NCCL_BLOCKING_WAIT": "1"}
        child = spawn(command, environment, stdout=output, stderr=errors)
        return cls(device, child, output, errors)

    def exchanges(self) -> Iterator[Exchange]:
        """Yield its exchanges, and a failed one if the process failed."""
        with self.output, self.errors:
            self.output.seek(0)
            yield from (Exchange(**json.loads(line)) for line in self.output.read().splitlines())
            if self.child.returncode:
                self.errors.seek(0)
                last = self.errors.read().decode(errors="replace").strip().splitlines()[-1:]
                why = f"the measuring process ended with exit code {self.child.returncode}"
                yield Exchange(self.device, -1, 0.0, ": ".join([why, *last]))


def pairings(nodes: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round; ``nodes - 1`` rounds (``nodes`` if odd) contain each pair once.

    At most ``ROUNDS`` rounds are returned, evenly spaced.
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


def _tournament(store: Store, node: int, nodes: int, device: int, backend: str) -> Iterator[Exchange]:
    """Yield the exchanges of a device, none with a partner that is gone or has another backend: that is its problem."""
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
        store.set(_meeting(number, node, device), backend)
        if store.get(_meeting(number, partner, device)).decode() != backend:
            continue
        try:
            group = PrefixStore(f"{number}/{pair[0]}-{pair[1]}/{device}", store)
            yield Exchange(device, partner, _exchange(group, pair.index(node), device, backend))
            failures = 0
        except (DistError, RuntimeError) as error:
            failures += 1
            yield Exchange(device, partner, 0.0, f"with node {partner}: {str(error).splitlines()[0]}")


def _exchange(store: Store, rank: int, device: int, backend: str) -> float:
    """Return the bytes per second in each direction of an all-reduce between two ranks."""
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=_PAIR_S)
    )
    try:
        place = torch.device("cuda", device) if backend == "nccl" else torch.device("cpu")
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
    """Return the key under which a device of a node joins a round, with its backend, or leaves it."""
    return f"meet/{number}/{node}/{device}"


def _leave(store: Store, node: int, device: int, rounds: Sequence[int]) -> None:
    """Tell the partners of these rounds not to wait."""
    for number in rounds:
        store.set(_meeting(number, node, device), _GONE)


def main(arguments: Sequence[str]) -> None:
    """Take part in the tournament with one device; print one exchange per line."""
    host, port, node, nodes, device, backend = arguments
    if backend == "nccl":
        torch.cuda.set_device(int(device))
    else:
        torch.set_num_threads(1)
    # A partner may be delayed by failures in all earlier rounds.
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_PAIR_S * (ROUNDS + 1)))
    for exchange in _tournament(_keys(store), int(node), int(nodes), int(device), backend):
        sys.stdout.write(json.dumps(asdict(exchange)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
