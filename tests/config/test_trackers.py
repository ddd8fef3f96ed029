"""Logins of the trackers: what is missing is learnt from their variables and files, as they read them themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdiff.config.command_line.train_flags import parse, print_dry_run
from fastdiff.config.trackers import problems, require_usable
from fastdiff.errors import ConfigError
from tests.support.processes import ROOT

KEY = "0123456789" * 4
CASES: dict[str, tuple[dict[str, str], dict[str, str], bool]] = {
    "nothing": ({}, {}, False),
    "a key": ({"WANDB_API_KEY": KEY}, {}, True),
    "a key of a self-hosted server": ({"WANDB_API_KEY": f"local-{KEY}"}, {}, True),
    "a part of a key": ({"WANDB_API_KEY": KEY[:20]}, {}, False),
    "an empty key": ({"WANDB_API_KEY": ""}, {}, False),
    "netrc": ({}, {".netrc": f"machine api.wandb.ai login user password {KEY}\n"}, True),
    "the other netrc": ({}, {"_netrc": f"machine api.wandb.ai login user password {KEY}\n"}, True),
    "NETRC": ({"NETRC": "mine"}, {"mine": f"machine api.wandb.ai login user password {KEY}\n"}, True),
    "a broken netrc": ({}, {".netrc": "machine\n"}, False),
    "netrc of another host": ({}, {".netrc": f"machine wandb.example login user password {KEY}\n"}, False),
    "netrc of WANDB_BASE_URL": (
        {"WANDB_BASE_URL": "https://wandb.example"},
        {".netrc": f"machine wandb.example login user password {KEY}\n"},
        True,
    ),
    "netrc with a port": (
        {"WANDB_BASE_URL": "http://localhost:8080"},
        {".netrc": f"machine localhost:8080 login user password {KEY}\n"},
        True,
    ),
    "a self-hosted server without a key": (
        {"WANDB_BASE_URL": "https://wandb.example"},
        {".netrc": f"machine api.wandb.ai login user password {KEY}\n"},
        False,
    ),
    "the server of the settings": (
        {},
        {
            ".config/wandb/settings": "[default]\nbase_url = https://wandb.example\n",
            ".netrc": f"machine wandb.example login user password {KEY}\n",
        },
        True,
    ),
    "a key in the settings": ({"WANDB_CONFIG_DIR": "given"}, {"given/settings": f"[default]\napi_key={KEY}\n"}, True),
    "settings that are broken": ({}, {".config/wandb/settings": "base_url\n"}, False),
}
_WANDB = """
import json, os, sys
import wandb
from wandb.sdk.lib import wbauth  # wandb.login asks the server who that is
for case, folder, variables in json.load(sys.stdin):
    os.chdir(folder)
    before = dict(os.environ)
    os.environ.update(variables, HOME=folder)
    try:
        host = wandb.setup().settings.base_url
        print(json.dumps([case, wbauth.authenticate_session(host=host, source="test", prompt=False) is not None]))
    except wandb.errors.AuthenticationError:
        print(json.dumps([case, False]))
    wandb.teardown()
    os.environ.clear()
    os.environ.update(before)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and working folder, without a variable of a tracker."""
    for name in os.environ:
        if name.startswith(("WANDB_", "TRACKIO_", "HF_", "NETRC", "SM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_key_of_wandb_is_found_where_wandb_finds_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real wandb says for each case whether it is logged in, and so do we."""
    asked, ours = [], {}
    for number, (case, (variables, files, _)) in enumerate(CASES.items()):
        folder = home / str(number)
        folder.mkdir()
        _write(folder, files)
        asked.append((case, str(folder), variables))
        with monkeypatch.context() as environment:
            environment.chdir(folder)
            environment.setenv("HOME", str(folder))
            for name, value in variables.items():
                environment.setenv(name, value)
            ours[case] = not list(problems(("wandb",)))
    done = subprocess.run(
        [sys.executable, "-c", _WANDB], input=json.dumps(asked), cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    theirs = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert theirs == {case: found for case, (_, _, found) in CASES.items()}, done.stderr
    assert ours == theirs


def test_a_missing_key_names_the_ways_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no API key") as refused:
        require_usable(("wandb",))
    for way in ("`wandb login`", "WANDB_API_KEY", "WANDB_MODE=offline", "--output.report_to tensorboard"):
        assert way in str(refused.value)
    assert "WANDB_DISABLED" not in str(refused.value)
    monkeypatch.setenv("WANDB_DISABLED", "true")
    assert "WANDB_DISABLED is not read by wandb" in next(problems(("wandb",)))


@pytest.mark.parametrize("mode", ["offline", "disabled", "dryrun"])
def test_no_key_is_needed_without_a_server(home: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    _write(home, {"wandb/settings": f"[default]\nmode = {mode}\n"})
    require_usable(("wandb", "tensorboard"))
    monkeypatch.setenv("WANDB_MODE", "online")
    assert list(problems(("wandb",))), "the variable goes before the file"
    (home / "wandb" / "settings").unlink()
    monkeypatch.setenv("WANDB_MODE", mode)
    require_usable(("wandb",))


@pytest.mark.parametrize("variable", ["WANDB_ANONYMOUS", "SM_TRAINING_ENV"])
def test_a_key_may_come_from_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "must")
    require_usable(("wandb",))


def test_a_mode_that_wandb_does_not_know_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(ConfigError, match="WANDB_MODE ofline: expected online, offline"):
        require_usable(("wandb",))


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, None),
        ({"TRACKIO_SPACE_ID": "me/space"}, "hf auth login"),
        ({"TRACKIO_SPACE_ID": "me/space", "HF_TOKEN": "hf_" + "x" * 30}, None),
        ({"TRACKIO_SERVER_URL": "http://host:7860"}, "TRACKIO_WRITE_TOKEN"),
        ({"TRACKIO_SERVER_URL": "http://host:7860", "TRACKIO_WRITE_TOKEN": "x"}, None),
        ({"TRACKIO_SERVER_URL": "http://host:7860/?write_token=x"}, None),
        ({"TRACKIO_SERVER_URL": "host:7860", "TRACKIO_WRITE_TOKEN": "x"}, "begins with http"),
    ],
)
def test_trackio_needs_what_its_server_needs(home: Path, variables: dict[str, str], problem: str | None) -> None:
    """In a process of its own: the hub's library reads its variables when it is imported."""
    code = "from fastdiff.config.trackers import problems; print(*problems(('trackio',)))"
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert (problem in done.stdout) if problem else not done.stdout.strip()


def test_a_dry_run_tells_of_a_missing_key(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", "digits", "--data.path", "x", "--output.report_to", "wandb"]
    _, config = parse(flags)
    print_dry_run(config, {})
    said = capsys.readouterr()
    assert json.loads(said.out)["config"]["output"]["project"] is None
    assert "warning: --output.report_to wandb: no API key" in said.err
