"""Rendezvous of the ranks: a TCPStore that rank 0 hosts on the address of MASTER_ADDR alone.

PyTorch's own rendezvous listens on every interface of the machine without authentication.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from fastdiff.errors import ConfigError


def meet(rank: int, host: str, port: int, timeout_s: float) -> Store:
    """Open the store for ``torch.distributed.init_process_group``.

    Args:
        rank: rank of this process; rank 0 hosts the store unless torchrun or a supervisor does. All other ranks connect
            to it.
        host: name or address of rank 0's machine.
        port: a free port there.
        timeout_s: timeout of the connection.

    Raises:
        ConfigError: the port is taken, or the host is unknown (rank 0 only).
    """
    timeout = timedelta(seconds=timeout_s)
    if rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(host, port, is_master=False, timeout=timeout)
    try:
        alone = os.environ.get("LOCAL_SIZE") == os.environ.get("WORLD_SIZE")
        listener = listen(host, port, alone=alone)
    except OSError as error:
        taken = "used by another program, perhaps another job" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(
            f"cannot listen on MASTER_ADDR {host}, MASTER_PORT {port}: {taken}; choose another port (deepspeed "
            "--master_port)",
            everywhere=False,
        ) from None
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def listen(host: str, port: int, *, alone: bool) -> socket.socket:
    """Listen on the address of ``host``, or on all addresses if other machines cannot reach that one.

    Args:
        host: name or address of this machine.
        port: port; 0: any free one.
        alone: True if only processes of this machine will connect.

    Raises:
        OSError: the port is taken, or the name is unknown (``socket.gaierror``).
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ip_address(address[0]).is_loopback and not alone:
        # Debian resolves a machine's own name to 127.0.1.1, which other machines cannot reach.
        return socket.create_server(("", port), backlog=4096)
    try:
        return socket.create_server((address[0], port), family=family, backlog=4096)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    # The address is forwarded to this machine without being its own, as that of a Kubernetes service.
    return socket.create_server(("", port), backlog=4096)
