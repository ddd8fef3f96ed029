"""The server of the page: Starlette on 127.0.0.1, for one user and his browser."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastdiff.console import log
from fastdiff.dashboard.access import Access
from fastdiff.dashboard.folders import Folders, names_of
from fastdiff.dashboard.page_files import TYPES, page_file
from fastdiff.dashboard.pictures import content
from fastdiff.dashboard.run_metadata import Have, RunMetadata, glance, signature, unreadable
from fastdiff.errors import ConfigError

HOST = "127.0.0.1"
FIRST_PORT = 7007
_PORTS = 100
"""Ports that are tried, from the first one."""
_POLL_S = 0.5
_ALIVE_S = 10.0
"""Seconds after which a silent stream of changes says that it lives."""
_MOST_WIDTH = 4096
_NUMBER = re.compile("[0-9]{1,18}")
_SLICE_S = 1.0
"""Seconds for which an answer reads a long log before it tells how far it is; Ctrl-C waits as long."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def bind(port: int | None) -> socket.socket:
    """Return a listening socket of this machine alone.

    Args:
        port: to listen on; None: the first free one from ``FIRST_PORT`` on, so that the address rarely changes.

    Raises:
        ConfigError: the port is taken.
    """
    for tried in [port] if port is not None else range(FIRST_PORT, FIRST_PORT + _PORTS):
        found = socket.socket()
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((HOST, tried))
            found.listen()  # the address is printed before the server takes its first request
        except OSError as error:
            found.close()
            reason = error.strerror
            continue
        return found
    named = f"--port {port}" if port is not None else f"ports {FIRST_PORT} to {FIRST_PORT + _PORTS - 1}"
    raise ConfigError(f"{named}: cannot be listened on ({reason}); choose another --port")


def serve(folders: Folders, listening: socket.socket, token: str | None) -> None:
    """Serve the page until Ctrl-C.

    Args:
        folders: runs to show.
        listening: socket of ``bind``.
        token: which other users of this machine need; None: they need none.

    Raises:
        KeyboardInterrupt: at Ctrl-C, after the server has ended.
    """
    server: uvicorn.Server
    app = application(folders, lambda: server.should_exit, token)
    config = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", lifespan="off", log_level="warning", access_log=False,
        timeout_graceful_shutdown=3, server_header=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.run(sockets=[listening])


def application(folders: Folders, ends: Callable[[], bool], token: str | None) -> Starlette:
    """Return the application.

    A request under another name than this machine's own is refused: a page of somebody else, whose name has been made
    to lead here (DNS rebinding), reads nothing.

    Args:
        folders: runs to show; nothing else on the disk can be asked for.
        ends: whether the server is about to end, so that streams do.
        token: which other users of this machine need; None: they need none.
    """
    runs = _Runs(folders)

    async def changes(request: Request) -> Response:
        return StreamingResponse(
            _changes(runs, ends), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    routes = [
        Route("/", _page),
        Route("/page/{name}", _page),
        Route("/runs", runs.answer_list),
        Route("/runs/{run}", runs.answer_facts),
        Route("/runs/{run}/pictures/{step}", runs.answer_picture),
        Route("/changes", changes),
    ]
    own_name = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    own_user = [] if token is None else [Middleware(Access, token=token)]
    return Starlette(routes=routes, middleware=[Middleware(_Headers), own_name, *own_user])


class _Runs:
    """The runs of the page and what is known of them."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._metadata: dict[str, RunMetadata] = {}
        self._seen: dict[str, str] = {}
        self._glances: dict[str, tuple[str, dict[str, Any]]] = {}
        self._looked, self._looking = 0.0, asyncio.Lock()
        self._decoding = asyncio.Semaphore(1)  # a strip of thumbnails leaves room for other answers

    async def signatures(self) -> dict[str, str]:
        """Return a text for each run that changes with its files; all pages share one look at the disk."""
        async with self._looking:
            if time.monotonic() - self._looked > _POLL_S / 2:
                self._seen = await asyncio.to_thread(self._look)
                self._looked = time.monotonic()
        return self._seen

    def _look(self) -> dict[str, str]:
        found = self._folders.find()
        self._metadata = {
            key: self._metadata.get(key) or RunMetadata(folder, _SLICE_S) for key, folder in found.items()
        }
        return {key: signature(folder) for key, folder in found.items()}

    async def _of(self, request: Request) -> RunMetadata | None:
        if request.path_params["run"] not in self._metadata:
            await self.signatures()
        return self._metadata.get(request.path_params["run"])

    async def answer_list(self, request: Request) -> Response:
        """Name the runs, in their order."""
        found = await asyncio.to_thread(self._glance, await self.signatures())
        return _json({"runs": found, "folders": self._folders.in_words(), "named": bool(self._folders.paths)})

    def _glance(self, signatures: dict[str, str]) -> list[dict[str, Any]]:
        """Return names and states of the runs; those that have not changed are not read again."""
        folders = {key: metadata.folder for key, metadata in self._metadata.items() if key in signatures}
        for key, folder in folders.items():
            if self._glances.get(key, ("",))[0] != signatures[key]:
                self._glances[key] = (signatures[key], _glance_of(folder))
        return [run | {"state": self._glances[run["key"]][1]} for run in names_of(folders)]

    async def answer_facts(self, request: Request) -> Response:
        """Return the sections of a run that the page does not have."""
        metadata = await self._of(request)
        if metadata is None:
            return _json({"error": "no such run"}, 404)
        return _json(await asyncio.to_thread(metadata.sections, _have(request)))

    async def answer_picture(self, request: Request) -> Response:
        """Return a sample picture; ``width`` makes it smaller."""
        metadata = await self._of(request)
        width = min(_number(request.query_params.get("width", "")) or 0, _MOST_WIDTH)
        step = _number(request.path_params["step"])
        picture = None if metadata is None or step is None else await asyncio.to_thread(metadata.picture, step)
        if picture is None:
            return _json({"error": "no such picture"}, 404)
        try:
            async with self._decoding:
                data, kind = await asyncio.to_thread(content, picture, width or None)
        except (OSError, ValueError):
            return _json({"error": "the picture cannot be read"}, 404)
        # Its address has the time of its last change.
        return Response(data, media_type=kind, headers={"Cache-Control": "private, max-age=86400"})


def _glance_of(folder: Path) -> dict[str, Any]:
    """Return the state of a run; whatever its files hold, the other runs are shown."""
    try:
        return glance(folder)
    except Exception as error:
        log.warning(f"{folder}: {type(error).__name__}: {error}", extra={"repeats": True})
        return unreadable(error)


async def _changes(runs: _Runs, ends: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield server-sent events: the signatures of all runs, whenever one has changed."""
    sent, told = None, time.monotonic()
    while not ends():
        now = await runs.signatures()
        if now != sent:
            sent, told = now, time.monotonic()
            yield f"data: {json.dumps(now)}\n\n"
        elif time.monotonic() - told > _ALIVE_S:
            told = time.monotonic()
            yield "event: alive\ndata: {}\n\n"
        await asyncio.sleep(_POLL_S)


async def _page(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    text = page_file(name)
    if text is None:
        return _json({"error": "no such file"}, 404)
    return Response(text, media_type=TYPES[Path(name).suffix], headers={"Cache-Control": "no-cache"})


def _number(text: str) -> int | None:
    """Return a number of an address; None: it is none, or longer than any step."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _have(request: Request) -> Have:
    try:
        found = json.loads(request.query_params.get("have", "{}"))
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(tag) for name, tag in found.items()} if isinstance(found, dict) else {}


def _json(content: Any, status: int = 200) -> Response:
    text = json.dumps(content, allow_nan=False)  # ASCII: a half of a surrogate pair in a record has no UTF-8
    return Response(text, status, headers={"Cache-Control": "no-store"}, media_type="application/json")


class _Headers:
    """Middleware that adds ``_HEADERS`` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        answer: Awaitable[None] = self._app(scope, receive, with_headers)
        await answer
