"""Rendezvous of the ranks: a TCPStore that rank 0 hosts on the address of MASTER_ADDR alone.

PyTorch's own rendezvous listens on every interface of the machine without authentication. DeepSpeed's launcher gives
every run the same port; runs on one machine then agree on a free one instead, so that two of them never meet.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from fastdiff.errors import ConfigError
from fastdiff.exit_message import started_s
from fastdiff.files import publish
from fastdiff.private_folders import local_folder

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

LISTENER = "FASTDIFF_LISTENER"
"""Environment variable of rank 0: descriptor of an inherited socket that listens on MASTER_PORT."""
_DEEPSPEED = 29_500
"""Port of every run of DeepSpeed's launcher without --master_port."""
_POLL_S = 0.05


def meet(rank: int, host: str, port: int, timeout_s: float, listener: socket.socket | None = None) -> Store:
    """Open the store for ``torch.distributed.init_process_group``.

    Args:
        rank: rank of this process; rank 0 hosts the store unless torchrun or a supervisor does. All other ranks connect
            to it.
        host: name or address of rank 0's machine.
        port: a free port there.
        timeout_s: timeout of the connection; also of the wait for all other ranks, where rank 0 notes its port.
        listener: socket of rank 0 that listens on the port; None: one is opened or, from a supervisor, inherited.

    Raises:
        ConfigError: the port is taken, or the host is unknown (rank 0 only); another rank did not start.
        OSError: rank 0 cannot note its port.
    """
    # The supervisor imports this file, not torch.
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        shared = TCPStore(host, port, is_master=False, timeout=timeout)
        # It outlives the ranks, and has the keys of earlier starts.
        return PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    alone = os.environ.get("LOCAL_SIZE") == os.environ.get("WORLD_SIZE")
    note = _note() if alone and port == _DEEPSPEED else None
    if rank:
        store = TCPStore(host, _noted(note, timeout_s) if note else port, is_master=False, timeout=timeout)
        if note:
            store.set(_met(rank), "")
        return store
    listener = listener or _bound(host, 0 if note else port, alone=alone)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    if note:
        _wait_for_all(store, note, port, timeout)
    return store


def _bound(host: str, port: int, *, alone: bool) -> socket.socket:
    """Return the socket of the supervisor, or one of this rank."""
    try:
        return _inherited() or listen(host, port, alone=alone)
    except OSError as error:
        taken = "used by another program, perhaps another job" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(
            f"cannot listen on MASTER_ADDR {host}, MASTER_PORT {port}: {taken}; choose another port (deepspeed "
            "--master_port)",
            everywhere=False,
        ) from None


def _wait_for_all(store: TCPStore, note: Path, port: int, timeout: timedelta) -> None:
    """Note the port until all other ranks have met rank 0; the process group itself may connect them much later."""
    from torch.distributed import DistStoreError  # type: ignore[attr-defined]

    others = range(1, int(os.environ["WORLD_SIZE"]))
    publish(note, str(port).encode())
    try:
        store.wait([_met(rank) for rank in others], timeout)
    except DistStoreError:
        missing = ", ".join(str(rank) for rank in others if not store.check([_met(rank)]))
        raise ConfigError(
            f"these ranks did not start within {timeout.total_seconds():.0f} s: {missing}; look for their messages",
            everywhere=False,
        ) from None
    finally:
        note.unlink(missing_ok=True)


def _met(rank: int) -> str:
    """Return the key that a rank sets once it has met rank 0."""
    return f"met/{rank}"


def _inherited() -> socket.socket | None:
    descriptor = os.environ.pop(LISTENER, None)
    if descriptor is None:
        return None
    os.set_inheritable(int(descriptor), False)
    return socket.socket(fileno=int(descriptor))


def _note() -> Path | None:
    """Return the file in which rank 0 notes its port; None if DeepSpeed's launcher has not started the ranks.

    The launcher may have started a script for each rank, which is then their parent.
    """
    process = os.getpid()
    while process > 1:
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            status = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return None
        if b"\0deepspeed.launcher.launch\0" in command:
            with suppress(OSError):
                return local_folder() / f"{process}-{started_s(process)}-port"
            return None
        process = int(status.rpartition(")")[2].split()[1])
    return None


def _noted(note: Path, timeout_s: float) -> int:
    """Wait until rank 0 has noted its port."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with suppress(FileNotFoundError):
            return int(note.read_text())
        time.sleep(_POLL_S)
    raise ConfigError(f"rank 0 did not start within {timeout_s:.0f} s; look for its message", everywhere=False)


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
