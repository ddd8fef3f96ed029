"""Where the ranks of a run meet: a store that rank 0 hosts on the address of MASTER_ADDR alone.

PyTorch's own listens on every interface of the machine, and asks nobody who they are.
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
        rank: Rank 0 hosts it, unless torchrun does; the others connect to it.
        host: Name or address of its machine.
        port: A free port there.
        timeout_s: How long the others wait for it.

    Raises:
        ConfigError: On rank 0: the port is taken, or the host is unknown.
    """
    timeout = timedelta(seconds=timeout_s)
    if rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(host, port, is_master=False, timeout=timeout)
    try:
        alone = os.environ.get("LOCAL_SIZE") == os.environ.get("WORLD_SIZE")
        listener = listen(host, port, alone=alone)
    except OSError as error:
        taken = "another program, perhaps another job, uses it" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(
            f"cannot listen on MASTER_ADDR {host}, MASTER_PORT {port}: {taken}; choose another port (deepspeed "
            "--master_port)",
            everywhere=False,
        ) from None
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def listen(host: str, port: int, *, alone: bool) -> socket.socket:
    """Listen at the address of ``host`` alone, or at all where that is not one at which others can reach this machine.

    Args:
        host: name or address of this machine.
        port: 0: any.
        alone: only processes of this machine will connect.

    Raises:
        OSError: the port is taken, or the name is unknown (``socket.gaierror``).
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ip_address(address[0]).is_loopback and not alone:
        # Debian lets a machine's own name stand for 127.0.1.1, which the other machines cannot reach.
        return socket.create_server(("", port), backlog=4096)
    try:
        return socket.create_server((address[0], port), family=family, backlog=4096)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    # The name stands for an address that leads here and is not of this machine, as that of a service of Kubernetes.
    return socket.create_server(("", port), backlog=4096)
