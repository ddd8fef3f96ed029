"""A local server of the hub with one repository, for downloads."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.servers import loopback
from tests.support.servers.loopback import Quiet


@contextmanager
def serve(folder: Path, repository: str, commit: str = "1" * 40) -> Iterator[Any]:
    """Serve a folder.

    Yields:
        The server: ``environment`` leads the library to it, ``commit`` may be changed, ``sent`` lists the files sent.
    """
    with loopback.serve(_Handler, folder=folder, repository=repository, commit=commit, sent=[]) as server:
        server.environment = {"HF_ENDPOINT": server.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        server.environment |= {"HF_HUB_ETAG_TIMEOUT": "240", "HF_HUB_DOWNLOAD_TIMEOUT": "240"}
        yield server


class _Handler(Quiet):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        server = self.server
        model = f"/api/models/{server.repository}"
        if self.path.startswith(f"{model}/tree/{server.commit}"):
            files = sorted(path for path in server.folder.rglob("*") if path.is_file())
            self.answer(
                [
                    {
                        "type": "file",
                        "path": str(path.relative_to(server.folder)),
                        "size": path.stat().st_size,
                        "oid": _etag(path),
                    }
                    for path in files
                ]
            )
        elif self.path.partition("?")[0] in (model, f"{model}/revision/main"):
            self.answer({"id": server.repository, "sha": server.commit, "siblings": []})
        else:
            self._file(body=True)

    def _file(self, *, body: bool) -> None:
        server = self.server
        start = f"/{server.repository}/resolve/{server.commit}/"
        path = server.folder / self.path.removeprefix(start)
        if not self.path.startswith(start) or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        self.send_response(200)
        for name, value in {
            "X-Repo-Commit": server.commit,
            "ETag": f'"{_etag(path)}"',
            "Content-Length": str(len(content)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            server.sent.append(self.path.removeprefix(start))
            self.wfile.write(content)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
