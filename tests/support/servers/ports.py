"""TCP ports for the processes that tests start."""

import socket
from collections import deque

_KEPT = 64
_reserved: deque[socket.socket] = deque()


def reserved_port() -> int:
    """Return a TCP port of the loopback interface that nobody else is given before its process listens on it.

    A port that is only free at this moment may be given to another process before the rank listens on it, which happens
    now and then among hundreds of ranks. Here a socket stays bound to each of the last ``_KEPT`` ports. It does not
    listen, and it allows the reuse of its address, so that the servers of torch and Python can listen on the same port.
    """
    if len(_reserved) == _KEPT:
        _reserved.popleft().close()
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    _reserved.append(keeper)
    return int(keeper.getsockname()[1])
