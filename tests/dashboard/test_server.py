"""The server: what it answers, whom it refuses, how it ends."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from fastdiff.dashboard import report, server
from fastdiff.dashboard.access import is_own
from fastdiff.dashboard.report import write_report
from fastdiff.errors import ConfigError
from tests.dashboard.folders import lines, picture, record, run_folder
from tests.support.processes import ROOT, fastdiff, stop
from tests.support.servers.browser import watch, watched
from tests.support.servers.ports import reserved_port


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, and a file beside them that is nobody's business."""
    folder = tmp_path_factory.mktemp("served")
    picture(run_folder(folder / "runs" / "a"), 50)
    (folder / "runs/a/spikes.jsonl").write_text(lines([{"step": 9, "keys": ["caf\udce9"]}]))
    run_folder(folder / "runs" / "b")
    (folder / "secret.png").write_bytes((folder / "runs/a/samples/step-00000050.png").read_bytes())
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with watched(cwd=runs) as found:
        yield found


def get(address: str, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    """Ask for exactly this path: nothing is normalised."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer, answer.read()


def keys(address: str) -> dict[str, str]:
    return {run["name"]: run["key"] for run in json.loads(get(address, "/runs")[1])["runs"]}


def test_it_serves_the_page_the_runs_and_their_pictures(address: str, runs: Path) -> None:
    page = get(address, "/")[1].decode()
    linked = re.findall(r'(?:src|href)="(page/[^"]+)"', page)
    assert len(linked) > 8
    for path in linked:
        answer, content = get(address, f"/{path}")
        assert answer.status == 200
        assert content
    key = keys(address)["a"]
    found = json.loads(get(address, f"/runs/{key}")[1])
    assert found["metrics"]["data"]["columns"]["step"]["mean"] == list(range(10, 110, 10))
    whole, small = (get(address, f"/runs/{key}/pictures/50{query}") for query in ("", "?width=100"))
    assert whole[1] == (runs / "runs/a/samples/step-00000050.png").read_bytes()
    assert small[0].headers["Content-Type"] == "image/webp"
    assert len(small[1]) < len(whole[1])


@pytest.mark.parametrize(
    "path",
    [
        "/page/../server.py", "/page/%2e%2e/server.py", "/page/..%2fserver.py", "/page//etc/passwd",
        "/page/run_metadata.py",
        "/runs/../secret.png", "/runs/{a}/pictures/../../run.json", "/runs/{a}/pictures/..%2f..%2frun.json",
        "/runs/{a}/pictures/51", "/runs/{a}/pictures/-1", "/runs/{a}/pictures/" + "9" * 400,
        "/runs/{a}/pictures/" + "9" * 5000, "/runs/{a}/pictures/50.5", "/runs/{a}/pictures/%D9%A5%D9%A0",
        "/runs/{a}/run.json", "/runs/" + quote("../secret", safe=""), "/runs/0123456789ab",
        "/runs/0123456789ab/pictures/50",
    ],
)  # fmt: skip
def test_nothing_else_on_the_disk_can_be_asked_for(address: str, path: str) -> None:
    answer, content = get(address, path.replace("{a}", keys(address)["a"]))
    assert answer.status == 404, content[:100]


@pytest.mark.parametrize("query", ["have=[", "have=[1]", "have=%7B%22metrics%22%3A1%7D", "have=" + "[" * 5000])
def test_a_strange_question_gets_everything(address: str, query: str) -> None:
    answer, content = get(address, f"/runs/{keys(address)['a']}?{query}")
    assert answer.status == 200
    assert json.loads(content)["metrics"]["data"]["first"] == 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7007", "127.0.0.1.evil.example", "10.0.0.1", ""])
@pytest.mark.parametrize("path", ["/", "/runs", "/changes"])
def test_another_name_of_this_machine_is_refused(address: str, host: str, path: str) -> None:
    """A page of somebody else can let its own name lead to 127.0.0.1 (DNS rebinding)."""
    answer, content = get(address, path, Host=host)
    assert answer.status == 400
    assert b"fastdiff" not in content


def test_half_a_surrogate_pair_in_a_record_is_answered(address: str) -> None:
    """As Python writes the name of a file that is no UTF-8."""
    key = keys(address)["a"]
    answer, content = get(address, f"/runs/{key}")
    assert answer.status == 200
    assert json.loads(content)["events"]["data"]["spikes"]["last"][0]["keys"] == ["caf\udce9"]


def test_the_page_may_ask_nobody_else(address: str) -> None:
    answer, _ = get(address, "/", Host="localhost:1234")  # as through an ssh tunnel
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in answer.headers


def as_nobody(address: str, path: str, *options: str) -> str:
    """Ask as another user of this machine; return the status, its headers and the content."""
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "curl", "-sS", "-i", *options]
    return subprocess.run([*command, address + path], capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_of_this_machine_needs_the_token(runs: Path) -> None:
    process, address = watch("runs/a", "--port", str(reserved_port()), cwd=runs)
    try:
        assert process.stdout is not None
        token = process.stdout.readline().partition("?token=")[2].strip()
        assert len(token) >= 32
        for path in ("/", "/runs", "/changes", "/page/main.js", "/?token=", f"/?token={token[:-1]}", "/?token=%C3%A9"):
            found = as_nobody(address, path)
            assert found.startswith("HTTP/1.1 403 "), path
            assert "with the token that `fastdiff watch` printed" in found
            assert token not in found
        assert as_nobody(address, "/runs", "-H", "Cookie: fastdiff-1=x").startswith("HTTP/1.1 403 ")
        first = as_nobody(address, f"/?token={token}", "-L", "-b", "")
        assert first.startswith("HTTP/1.1 303 ")
        assert "<!doctype html>" in first
        assert "httponly; path=/; samesite=strict" in first.lower()
        cookie = first.partition("set-cookie: ")[2].partition(";")[0]
        assert '"name": "a"' in as_nobody(address, "/runs", "-H", f"Cookie: {cookie}")
        assert get(address, "/runs")[0].status == 200, "its own user needs none"
    finally:
        stop(process)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_without_a_token_every_user_of_this_machine_reads(runs: Path) -> None:
    with watched("runs/a", "--no-token", cwd=runs) as address:
        assert '"name": "a"' in as_nobody(address, "/runs")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_is_known_by_the_user_of_its_other_end(family: socket.AddressFamily) -> None:
    """Also one through a socket of IPv6; not one that its program has closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(family) as other:
        port = listening.getsockname()[1]
        other.connect(("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", port))
        accepted, client = listening.accept()
        with accepted:
            scope = {"client": client, "server": ("127.0.0.1", port)}
            assert is_own(scope)
            assert not is_own(scope | {"client": ("127.0.0.1", 1)})
            other.close()
            assert not is_own(scope)


def test_a_run_that_breaks_the_page_does_not_take_the_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = run_folder(tmp_path / "runs/whole"), run_folder(tmp_path / "runs/broken")
    hostile = [
        b"[" * 400 + b"]" * 400, b'{"step": 1, "a": ' + b'{"b":' * 400 + b"1" + b"}" * 401, b"[]", b'{"step": 1e999}',
        b'{"step": 1, "loss": ' + b"9" * 4000 + b"}", b'{"step": ' + b"9" * 5000 + b"}", b"\xff\xfe", b'{"step": NaN}',
    ]  # fmt: skip
    for name in ("run.json", "metrics.jsonl", "ledger.jsonl", "spikes.jsonl", "validation.jsonl"):
        (broken / name).write_bytes(b"\n".join(hostile) + b"\n")
    with watched(cwd=tmp_path) as address:
        assert keys(address).keys() == {"whole", "broken"}
        answer, content = get(address, f"/runs/{keys(address)['broken']}")
    assert answer.status == 200
    told = json.loads(content)["left_out"]["data"]
    assert told["metrics.jsonl"] == told["spikes.jsonl"] == [
        "line 1: nested more than 50 levels", "line 2: nested more than 50 levels",
        "line 3: no object with a number step",
        "line 6: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits",
        "line 7: no JSON",
    ]  # fmt: skip
    assert told["run.json"][0].startswith("no JSON that can be read: ")
    monkeypatch.setattr(report, "glance", lambda folder: {} if folder == whole else 1 // 0)
    assert write_report([whole, broken], tmp_path / "out.html")
    assert "its files cannot be read: ZeroDivisionError" in (tmp_path / "out.html").read_text()


def test_it_tells_of_changes_as_they_come(runs: Path, address: str) -> None:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.request("GET", "/changes")
    stream = connection.getresponse()
    assert stream.headers["Content-Type"].startswith("text/event-stream")

    def told() -> dict[str, str]:
        while not (line := stream.readline()).startswith(b'data: {"'):
            assert line, "the stream has ended"
        return json.loads(line.removeprefix(b"data: "))  # type: ignore[no-any-return]

    def told_until(holds: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        while not holds(found := told()):  # a look may fall between two files of a run
            pass
        return found

    key, before = keys(address)["b"], told()
    with (runs / "runs/b/metrics.jsonl").open("a") as file:
        file.write(lines([record(110)]))
    after = told_until(lambda runs: runs[key] != before[key])
    assert {run for run in after if after[run] != before[run]} == {key}
    run_folder(runs / "runs/late")
    told_until(lambda runs: len(runs) == len(before) + 1)
    shutil.rmtree(runs / "runs/late")
    told_until(lambda runs: runs.keys() == before.keys())
    connection.close()


def test_ctrl_c_ends_it_with_one_line(runs: Path) -> None:
    """Also while a page is open, whose stream of changes has no end."""
    process, address = watch("runs/a", "--port", str(reserved_port()), cwd=runs)
    try:
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        connection.request("GET", "/changes")
        connection.getresponse().readline()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        stop(process)
    assert process.returncode == 0
    assert output.split("\n")[-3:] == ["", "no longer served; the runs go on", ""]


def test_a_port_that_is_taken_is_an_error_with_the_remedy(runs: Path, address: str) -> None:
    port = address.rpartition(":")[2]
    done = fastdiff("watch", "--port", port, cwd=runs)
    assert done.code == 2
    assert f"--port {port}: cannot be listened on (Address already in use); choose another --port" in done.output
    process, other = watch(cwd=runs)
    stop(process)
    assert other != address, "without --port the next free one is taken"


def test_a_port_on_which_another_server_begins_to_listen_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket allows the reuse of the address, as the page's does, so that both can be bound."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((server.HOST, 0))
        port = other.getsockname()[1]

        class Late(socket.socket):
            def bind(self, address: Any) -> None:
                super().bind(address)
                other.listen()

        monkeypatch.setattr(server.socket, "socket", Late)
        with pytest.raises(ConfigError, match=f"--port {port}: cannot be listened on"):
            server.bind(port)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["watch", "runs/c"], "runs/c: no folder of a run; runs there: a, b"),
        (["report", "runs/c", "out.html"], "runs/c: no run (no run.json); runs there: a, b"),
        (["report", "runs/a", "runs/b"], "runs/b: expected the name of a file to write, with .html, as the last"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(runs: Path, arguments: list[str], message: str) -> None:
    done = fastdiff(*arguments, cwd=runs)
    assert done.code == 2
    assert done.output.startswith(f"fastdiff: error: {message}")
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("arguments", [["watch", "--help"], ["report", "runs/a", "out.html"]])
def test_neither_command_imports_torch(runs: Path, arguments: list[str]) -> None:
    code = (
        "import sys\nimport fastdiff.dashboard.server\nfrom fastdiff.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'deepspeed', 'diffusers', 'matplotlib', 'scipy'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, *arguments]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=runs, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
