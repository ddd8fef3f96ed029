"""Uploads to a local server that speaks the protocol of the hub."""

import base64
import json
from pathlib import Path

from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.processes import fastdiff
from tests.support.runs import launch, tiny
from tests.support.servers import loopback
from tests.support.servers.loopback import Quiet


class _Hub(Quiet):
    """Takes every file as a regular one and keeps it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        body = self._body()
        server.tokens.add(self.headers.get("authorization"))
        if self.path == "/api/repos/create":
            server.created.append(json.loads(body))
            self.answer({"url": f"{server.address}/me/model", "id": "me/model"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{server.address}/me/model/commit/1", "commitOid": "1" * 40, "success": True})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        else:
            self.answer({"error": self.path}, 404)

    def do_GET(self) -> None:
        sha = {"id": "me/model", "sha": "0" * 40, "siblings": []}
        self.answer(sha if self.path.startswith("/api/models/me/model") else {"error": self.path})

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = b""
        while size := int(self.rfile.readline(), 16):
            parts += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return parts


def test_an_export_is_uploaded_or_kept(world: World, digits: Path, tmp_path: Path) -> None:
    train(tiny(digits, tmp_path / "run", steps=1), launch(1), world)
    upload = ["--format", "safetensors", "--push-to-hub", "me/model", "--private"]
    with loopback.serve(_Hub, files={}, created=[], tokens=set()) as server:
        at_hub = {"HF_ENDPOINT": server.address, "HF_TOKEN": "hf_of_the_test", "HF_HUB_DISABLE_XET": "1"}
        done = fastdiff("export", tmp_path / "run", tmp_path / "out", *upload, **at_hub)
    assert done.code == 0, done.output
    assert f"{server.address}/me/model" in done.output
    assert server.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "model.safetensors"} == set(server.files)
    assert 'load_file(hf_hub_download("me/model", "model.safetensors"))' in server.files["README.md"].decode()
    [created] = server.created
    assert (created["name"], created["organization"]) == ("model", "me")
    assert created.get("visibility") == "private" or created.get("private") is True, "by the version of the library"
    assert server.tokens == {"Bearer hf_of_the_test"}

    done = fastdiff("export", tmp_path / "run", tmp_path / "again", *upload, **at_hub)  # there is no server now
    assert done.code == 74, done.output
    assert "not uploaded to me/model" in done.output
    assert f"hf upload me/model {tmp_path / 'again'}" in done.output
    assert "Traceback" not in done.output
    assert (tmp_path / "again" / "model.safetensors").exists()
