"""No secret is written or shown, and the ranks listen on the address of the job alone."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdiff import sanitize
from fastdiff.sanitize import escape
from tests.support.nights import by_day
from tests.support.processes import ROOT, run
from tests.support.runs import flags, tiny
from tests.support.scripts import TRAIN, run_script
from tests.support.servers.ports import reserved_port
from tests.support.servers.web_servers import http_server

SECRETS = {
    "password": "correct-horse",
    "signature": "AKIASIGNATURE0123456789",
    "comet": "comet-key-0123456789",
    "hub": "hf_abcdefghijklmnopqrstuvwxyz",
    "wandb": "0123456789abcdef0123456789abcdef01234567",
    "aws": "wJalrXUtnFEMIK7MDENG",
}


@pytest.fixture
def served(digits: Path, tmp_path: Path) -> Iterator[str]:
    """The address of the digits, as a server that asks for a password and a signature would have it."""
    shutil.copytree(digits, tmp_path / "served")
    with http_server(tmp_path / "served") as server:
        yield f"http://me:{SECRETS['password']}@127.0.0.1:{server.port}?X-Amz-Signature={SECRETS['signature']}"


def found_in(text: bytes) -> list[str]:
    return [name for name, secret in SECRETS.items() if secret.encode() in text]


@pytest.mark.fault(28)
@pytest.mark.parametrize("ends", by_day(["well"], "in an error", "before it begins"))
def test_no_secret_is_in_any_file_or_line_of_a_run(served: str, tmp_path: Path, ends: str, nightly: bool) -> None:
    """With every tracker; by day with the one that needs no seconds to be imported."""
    out = tmp_path / "out"
    trackers = ("tensorboard", "wandb", "trackio") if nightly else ("tensorboard",)
    config = tiny(Path("x"), out / "run", steps=2, output__report_to=trackers)
    data = dataclasses.replace(config.data, path="")
    wrong = {"well": 8, "in an error": 8, "before it begins": 16}[ends]
    config = dataclasses.replace(config, data=data, model=dataclasses.replace(config.model, size=wrong))
    if ends == "in an error":
        [damaged] = (tmp_path / "served").glob("train-000003.tar")
        damaged.write_bytes(bytes(damaged.stat().st_size))
        config = dataclasses.replace(config, samples=16 * 200)
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "comet": {"enabled": False, "api_key": SECRETS["comet"]}})
    )
    given = ["--data.path", served, "--data.cache", str(out / "cache"), "--deepspeed_config", str(tmp_path / "ds.json")]
    environment = {
        "HF_TOKEN": SECRETS["hub"], "WANDB_API_KEY": SECRETS["wandb"], "AWS_SECRET_ACCESS_KEY": SECRETS["aws"],
        "WANDB_MODE": "offline", "TRACKIO_DIR": str(out / "trackio"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [*flags(config), *given]
    done = run_script(TRAIN, *command, **environment)
    assert done.code == {"well": 0, "in an error": 65, "before it begins": 2}[ends], done.output
    assert not found_in(done.output.encode())
    files = [path for path in out.rglob("*") if path.is_file()]
    assert (out / "run" / "run.json").exists() == (ends != "before it begins")
    assert {str(path): found for path in files if (found := found_in(path.read_bytes()))} == {}
    if ends == "well":
        record = json.loads((out / "run" / "run.json").read_text())
        assert record["config"]["data"]["path"] == served.partition("?")[0].replace(f"me:{SECRETS['password']}@", "")
        assert record["deepspeed"]["comet"]["api_key"] == "***"
        assert_nothing_to_run(out / "run" / "checkpoints")
        dry = run_script(TRAIN, *command, "--dry-run", **environment)
        assert dry.code == 0
        assert not found_in(dry.output.encode())


def assert_nothing_to_run(checkpoints: Path) -> None:
    files = [path for path in checkpoints.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        assert not os.access(path, os.X_OK) or not path.stat().st_mode & 0o111
        begin = path.read_bytes()[:9]
        assert begin[:1] == b"{" or begin[8:] == b"{", "JSON, or the header of a safetensors file"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("https://me:pw@host:8/a/{0..9}.tar?sig=1#x", "https://host:8/a/{0..9}.tar"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("/data/a?b#c", "/data/a?b#c"),
        ("a/b", "a/b"),
        ("http://[::1/x?token=1", "http://***"),
        ("https://me:it's@host/x", "https://host/x"),
        ("https://me:two words@host/a b?sig=1 2", "https://host/a b"),
    ],
)
def test_addresses_are_shown_without_credentials(given: str, shown: str) -> None:
    assert sanitize.address(given) == shown
    assert sanitize.argument(f"--data.path={given}") == f"--data.path={shown}"
    assert sanitize.argument(given) == shown
    assert sanitize.tree([given]) == [shown]


def test_addresses_within_a_line_are_found_wherever_they_begin() -> None:
    given = "cannot open 'https://me:pw@host/x?sig=1' (-ihttp://me:it's@host) or 2https://me:pw@host, 5 = 5"
    assert sanitize.message(given) == "cannot open 'https://host/x' (-ihttp://host) or 2https://host, 5 = 5"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("Authorization: Bearer pw12345678", "Authorization: ***"),
        ("{'Authorization': 'Bearer pw', 'Accept': '*/*'}", "{'Authorization': '***', 'Accept': '*/*'}"),
        (
            '{"hf_token": "pw", "tokens": 3, "tokenizer": "a"}',
            '{"hf_token": "***", "tokens": 3, "tokenizer": "a"}',
        ),
        ("X-Auth-Token: pw and more", "X-Auth-Token: *** and more"),
        ("refused: bearer pw12345678.", "refused: bearer ***"),
        ("set-cookie: session=pw; path=/", "set-cookie: ***; path=/"),
        (f"invalid token hf_{'Ab1' * 12}", "invalid token ***"),
        (f"no such folder /data/hf_{'Ab1' * 12}/x", f"no such folder /data/hf_{'Ab1' * 12}/x"),
        ("a basic transformer; secret: none", "a basic transformer; secret: none"),
        ("HTTPS_PROXY=http://me:pw@proxy:3128", "HTTPS_PROXY=http://proxy:3128"),
    ],
)
def test_headers_entries_and_tokens_within_a_line_are_hidden(given: str, shown: str) -> None:
    assert sanitize.message(given) == shown


@pytest.mark.fault(28)
def test_a_long_line_is_gone_through_once() -> None:
    """A million letters are done in milliseconds; in the square of that they would take an hour."""
    code = "from fastdiff.sanitize import argument, message, tree; text = 'a' * 10**6; "
    code += "assert argument(text) == message(text) == tree(text) == text"
    assert run([sys.executable, "-c", code], timeout_s=240).code == 0


def test_values_are_hidden_by_name_and_in_the_addresses_of_texts() -> None:
    given = {
        "api_key": "a", "apiKey": "b", "nested": [{"hf_token": "c", "tokens": 3}], "PASSWD": "d",
        "prompts": ["a cat on https://me:pw@host?x"], "path": "https://me:pw@host/x", "text_tokenizer": "clip",
        "api_keys": ["e", ["f"]], "password": 1234, "use_token": True, "max_tokens": [77], "secret": None,
        "credentials": {"user": {"password": "g"}},
    }  # fmt: skip
    assert sanitize.tree(given) == {
        "api_key": "***", "apiKey": "***", "nested": [{"hf_token": "***", "tokens": 3}], "PASSWD": "***",
        "prompts": ["a cat on https://host"], "path": "https://host/x", "text_tokenizer": "clip",
        "api_keys": ["***", ["***"]], "password": "***", "use_token": True, "max_tokens": [77], "secret": None,
        "credentials": {"user": {"password": "***"}},
    }  # fmt: skip


@pytest.mark.fault(28)
def test_foreign_text_cannot_command_a_terminal() -> None:
    title, reverse = "\x1b]0;owned\x07\x9b2J", "\u202egnp.exe"
    assert escape(f"a{title}\r\n{reverse}\ud800") == "a\\x1b]0;owned\\x07\\x9b2J\\x0d\\x0a\\x202egnp.exe\\ud800"
    assert escape("\u061c") == "\\x61c"
    assert escape("日本語 é") == "日本語 é"
    assert len(escape("x" * (10 << 20))) < 2100


# --- where ranks meet ------------------------------------------------------------------------------------------------

MEETS = """
import sys, psutil, torch
from fastdiff.parallel.rendezvous import meet
store = meet(0, "127.0.0.1", int(sys.argv[1]), 30.0)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.distributed.all_reduce(torch.ones(1))
listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
print(*sorted({address.ip for address in listening}), sys.argv[1] in {str(address.port) for address in listening})
"""


@pytest.mark.nightly
def test_the_store_of_the_ranks_listens_on_its_own_address_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEETS, str(reserved_port())], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["127.0.0.1", "True"], done.stderr


@pytest.mark.fault(27)
def test_a_port_that_is_in_use_is_a_clear_error() -> None:
    from fastdiff.errors import ConfigError
    from fastdiff.parallel.rendezvous import meet

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"MASTER_PORT {port}: used by another program") as caught:
            meet(0, "127.0.0.1", port, 5.0)
    assert caught.value.exit_code == 2
