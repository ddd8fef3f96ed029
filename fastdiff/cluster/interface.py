"""The network interface of gloo, on machines whose own name stands for an address that only they can reach.

Gloo listens at the address of the machine's name and tells it to the others: on Debian that is often 127.0.1.1.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from ipaddress import ip_address

from torch.distributed import Store  # type: ignore[attr-defined]

from fastdiff.cluster.waiting import value_of

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_JOIN_S = 300.0


def choose(store: Store, master: str, node: int, nodes: int) -> None:
    """Set ``GLOO_SOCKET_IFNAME`` for what this process starts, if it is needed; called on all nodes.

    Args:
        store: of the supervisors.
        master: host of node 0.
        node: number of this node.
        nodes: how many there are.

    Raises:
        torch.distributed.DistError: node 1 did not come, or node 0 is gone.
    """
    if node == 1:
        store.set("address/1", own_address(master))
    if nodes == 1 or _VARIABLE in os.environ or _is_reachable(socket.gethostname()):
        return
    other = master if node else value_of(store, "address/1", time.monotonic() + _JOIN_S).decode()
    name = _interface_of(own_address(other))
    if name is not None:
        os.environ[_VARIABLE] = name


def own_address(other: str) -> str:
    """Return the address of this machine from which it reaches ``other``; nothing is sent."""
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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
