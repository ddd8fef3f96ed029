"""Environment variables of the ranks of a node: world, folders, NCCL's flight recorder, gloo's interface."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from fastdiff.cluster.supervisor.nodes import JOIN_S
from fastdiff.cluster.supervisor.waiting import value_of
from fastdiff.exit_message import NODE_FOLDER
from fastdiff.ledger.records import STARTED, process_began
from fastdiff.parallel.heartbeat import MICRO_LIMIT
from fastdiff.parallel.rendezvous import LISTENER

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_NCCL = "nccl"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
PREFLIGHT = "FASTDIFF_PREFLIGHT"
"""Environment variable of the ranks of a single node: rank 0 is to check the node before it trains."""


def of_rank(
    base: Mapping[str, str],
    *,
    local_rank: int,
    ranks_per_node: int,
    node: int,
    nodes: int,
    attempt: int,
    micro: int | None,
    master: tuple[str, int],
    listener: socket.socket | None,
    preflight: bool,
    node_folder: Path,
    run: Path,
) -> dict[str, str]:
    """Return the environment of one rank.

    Args:
        base: environment of the supervisor.
        local_rank: number of the rank on this node.
        ranks_per_node: number of ranks on every node.
        node: number of this node.
        nodes: number of nodes.
        attempt: number of times that the ranks have been started before.
        micro: most samples of a micro-batch, after a lack of memory; a network file system may show the file in which
            the run folder remembers it too late. None: the memory has sufficed.
        master: host and port of the store of the ranks. The port is already bound, so no other program can take it.
        listener: socket on that port, on which rank 0 hosts the store (a single node); None: node 0's supervisor hosts
            it.
        preflight: whether rank 0 is to check the node.
        node_folder: private folder of the supervisor on this node.
        run: the run folder; NCCL's flight recorder writes to ``nccl/`` in it at a timeout.
    """
    return {
        **{name: value for name, value in base.items() if name not in (LISTENER, PREFLIGHT, MICRO_LIMIT)},
        "RANK": str(node * ranks_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_SIZE": str(ranks_per_node),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_USE_AGENT_STORE": str(listener is None),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        **({LISTENER: str(listener.fileno())} if listener is not None and local_rank == 0 else {}),
        **({PREFLIGHT: "1"} if preflight else {}),
        **({MICRO_LIMIT: str(micro)} if micro is not None else {}),
        NODE_FOLDER: str(node_folder),
        STARTED: str(time.time() if attempt else process_began()),
        # https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
        "TORCH_FR_BUFFER_SIZE": base.get("TORCH_FR_BUFFER_SIZE", "2000"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{run.absolute() / _NCCL}/rank-",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{node_folder / _NCCL}-",
    }


def request_nccl_dumps(node_folder: Path, run: Path) -> None:
    """Let NCCL's flight recorder write the records of every rank of this node; a no-op without NCCL.

    By itself it writes only at its timeout, which is later than the detection of the hang.
    """
    pipes = list(node_folder.glob(f"{_NCCL}-*.pipe"))
    if pipes:
        with contextlib.suppress(OSError):  # a full disk has no room for the dumps either
            (run / _NCCL).mkdir(parents=True, exist_ok=True)
    for pipe in pipes:
        with contextlib.suppress(OSError):  # the pipe has no reader any more
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"1")
            finally:
                os.close(descriptor)


def choose_interface(store: Store, master: str, node: int) -> None:
    """Set ``GLOO_SOCKET_IFNAME`` for child processes if other nodes cannot reach this host's name; on all nodes.

    Args:
        store: store of the supervisors.
        master: host of node 0.
        node: number of this node, of several.

    Raises:
        torch.distributed.DistError: node 1 did not arrive, or node 0 is gone.
    """
    if node == 1:
        store.set("address/1", own_address(master))
    if _GLOO_INTERFACE in os.environ or _is_reachable(socket.gethostname()):
        return
    other = master if node else value_of(store, "address/1", time.monotonic() + JOIN_S).decode()
    name = _interface_of(own_address(other))
    if name is not None:
        os.environ[_GLOO_INTERFACE] = name


def own_address(other: str) -> str:
    """Return the local address of the route to ``other``; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_reachable(host: str) -> bool:
    try:
        return not ip_address(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]).is_loopback
    except OSError:
        return False


def _interface_of(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # no IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
