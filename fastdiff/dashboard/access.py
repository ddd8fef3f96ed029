"""Who may read the page: the programs of the user who serves it, and whoever has its token."""

import asyncio
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import URL
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"
_REFUSAL = (
    "This page belongs to another user of this machine. Open it by the address with the token that `fastdiff watch` "
    "printed; its user can start it with --no-token to let everybody on this machine read it.\n"
)


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True)
class Access:
    """Middleware that refuses requests of other users of the machine who do not have the token.

    The token comes in the address (``?token=``), for which the answer sets a cookie and leads to the address without
    it, or in that cookie. Requests of the user's own programs need none: the kernel tells whose a connection is.
    """

    app: ASGIApp
    token: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = HTTPConnection(scope)
        cookie = f"fastdiff-{request.url.port}"  # browsers share cookies between all ports of a host
        if self._is_token(request.query_params.get("token")):
            answer = RedirectResponse(_without_token(request.url), 303)
            answer.set_cookie(cookie, self.token, httponly=True, samesite="strict")
            await answer(scope, receive, send)
        elif self._is_token(request.cookies.get(cookie)) or await asyncio.to_thread(is_own, scope):
            await self.app(scope, receive, send)
        else:
            await PlainTextResponse(_REFUSAL, 403, {"Cache-Control": "no-store"})(scope, receive, send)

    def _is_token(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), self.token.encode())


def _without_token(address: URL) -> str:
    rest = address.remove_query_params("token")
    return rest.path + (f"?{rest.query}" if rest.query else "")


def is_own(scope: Scope) -> bool:
    """Return whether the other end of a connection on this machine is a socket of this user.

    Only one that is open counts: the kernel gives one that its program has closed to root.
    """
    client, server = scope.get("client"), scope.get("server")
    if client is None or server is None:
        return False
    ends = f"{_hexadecimal(*client)} ", f"{_hexadecimal(*server)} "
    for table in _TABLES:
        try:
            lines = Path(table).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if all(end in line for end in ends):
                _, local, _, state, _, _, _, user, _, inode = line.split()[:10]
                if local.endswith(ends[0].strip()) and state == _ESTABLISHED and inode != "0":
                    return int(user) == os.getuid()
    return False


def _hexadecimal(host: str, port: int) -> str:
    """Return an address of IPv4 as the kernel's tables have it, also at the end of one of IPv6 that maps it."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
