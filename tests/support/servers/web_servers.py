"""Servers on the loopback interface: http with ranges and failures on demand, and one that speaks S3."""

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from tests.support.servers import loopback
from tests.support.servers.loopback import Quiet

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass
class WebServer:
    """Behaviour and requests of a running http server; both may be changed and read at any time."""

    folder: Path
    port: int = 0
    drop_after: int | None = None
    """Bytes of a response after which the connection is cut, in the next ``drops`` responses."""
    drops: int = 0
    refuse: list[int] = field(default_factory=list)
    """Statuses of the next requests."""
    ranges: bool = True
    states_length: bool = True
    encoding: str | None = None
    """Content-Encoding that every response claims."""
    etag: str = '"one"'
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range of every request."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def http_server(folder: Path) -> Iterator[WebServer]:
    """Serve the files of a folder."""
    state = WebServer(folder)
    with loopback.serve(_Handler, state=state) as server:
        state.port = server.server_port
        yield state


class _Handler(Quiet):
    def do_GET(self) -> None:
        state, asked = self.server.state, self.headers.get("Range")
        with state.lock:
            state.requests.append((self.path, asked))
            status = state.refuse.pop(0) if state.refuse else None
            cut = state.drop_after if state.drops > 0 else None
            state.drops -= cut is not None
        path = state.folder / self.path.partition("?")[0].lstrip("/")
        if status is None and not path.is_file():
            status = 404
        if status is not None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send(path.read_bytes(), asked if state.ranges else None, cut)

    def _send(self, content: bytes, asked: str | None, cut: int | None) -> None:
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked else 0  # type: ignore[index]
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if self.server.state.states_length:
            self.send_header("Content-Length", str(len(content) - start))
        if self.server.state.encoding:
            self.send_header("Content-Encoding", self.server.state.encoding)
        self.send_header("ETag", self.server.state.etag)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[start:] if cut is None else content[start : start + cut])
        self.close_connection = True


@contextlib.contextmanager
def s3_server(files: dict[str, bytes], bucket: str = "bucket") -> Iterator[str]:
    """An S3-compatible server with these objects; yields the address of the bucket.

    The environment names the server and its credentials while the context lasts, as it does for users.
    """
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with mock.patch.dict("os.environ", {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}):
            client = boto3.client("s3")
            client.create_bucket(Bucket=bucket)
            for name, content in files.items():
                client.put_object(Bucket=bucket, Key=name, Body=content)
            yield f"s3://{bucket}"
    finally:
        server.stop()
