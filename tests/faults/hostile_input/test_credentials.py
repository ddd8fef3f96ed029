"""No command shows or writes the credentials of an address, however the address is written and wherever it is given."""

import argparse
import contextlib
import io
import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdiff import sanitize
from fastdiff.cli import main as commands
from fastdiff.config import run_record
from fastdiff.config.arguments import types as argument_types
from fastdiff.config.command_line import train_flags
from fastdiff.data.shards import remote
from fastdiff.errors import DataError
from fastdiff.train import main as train

SECRET = "aKIAh4mSTERw0rd"
FORMS = (
    "{scheme}://u:{secret}@h/x",
    "{scheme}://{secret}@h/x",
    "{scheme}:/u:{secret}@h/x",
    "{scheme}:///u:{secret}@h/x",
    "{scheme}://u:s/{secret}@h/x",
    "{scheme}://u:{secret}/s@h/x",
    "{scheme}://u:{secret}?s@h/x",
    "{scheme}://u:7#{secret}@h/x",
    "{scheme}://u:two {secret}@h/x",
    "{scheme}://u:it's{secret}@h/x",
    "{scheme}://h:8/x;token={secret}",
    "{scheme}://h/x;a;password={secret}/y",
    "{scheme}://h/x#{secret}",
    "{scheme}://[::1/x?token={secret}",
    "{scheme}://u:{secret}",
    *(
        f"{{scheme}}:{slashes}h/x?a=b@c&{names}={{secret}}"
        for slashes in ("/", "//")
        for names in (
            "sig",
            "se=1&sp=r&sv=2&sig",
            "X-Amz-Signature",
            "AWSAccessKeyId",
            "Signature",
            "token",
            "anything",
        )
    ),
    "{scheme}:\\\\u:{secret}@h\\x",
    "{scheme}:\\u:{secret}@h\\x",
    "{scheme}:/\\u:{secret}@h/x",
    "{scheme}:\\/\\/u:{secret}@h/x",
    "{scheme}://u:p@{secret}@h/x",
    "{scheme}://u:p@ss/{secret}@h/x",
    "{scheme}://u:p\\{secret}@h/x",
    "{scheme}://u%3A{secret}%40h/x",
    "{scheme}%3A//u:{secret}@h/x",
    "{scheme}:%2F%2Fu:{secret}@h/x",
    "{scheme}%3A%2F%2Fu%3A{secret}%40h%2Fx",
    "{scheme}%253A%252F%252Fu%253A{secret}%2540h",
    "{scheme}:/\t/u:{secret}@h/x",
    "{scheme}://u:a\t{secret}@h/x",
    "{scheme}://http://u:{secret}@h/x",
    "view-source:{scheme}://u:{secret}@h/x",
    "git+{scheme}://u:{secret}@h/x",
    " {scheme}://u:{secret}@h/x",
    "<{scheme}://u:{secret}@h/x>",
    "{scheme}\uff1a\uff0f\uff0fu:{secret}@h/x",
    "s3://u:7/{secret}@h/x",
    "//u:{secret}@h/x",
    "//{secret}@h/x",
    "//u:s/{secret}@h/x",
    "\\\\u:{secret}@h\\x",
    "u:{secret}@h/x",
    "u:s/{secret}@h/x",
    "u%3A{secret}%40h/x",
    "h/x;token={secret}",
    "h/x?a=b&X-Amz-Credential={secret}",
    "h/x?sv=2&sig={secret}",
)
SCHEMES = ("http", "https", "HTTP", "hTTps", "s3", "S3", "gs", "ftp", "az")
ADDRESSES = st.builds(
    lambda form, scheme: form.format(scheme=scheme, secret=SECRET), *map(st.sampled_from, (FORMS, SCHEMES))
)

BY_DAY, BY_NIGHT = (
    settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    for count in (3, 24)
)

FASTDIFF = [
    ["verify", "{}"],
    ["sample", "{}"],
    ["sample", "nothing", "--grid", "{}"],
    ["sample", "nothing", "--npz", "{}", "--num", "1"],
    ["sample", "nothing", "--low-res", "{}", "--npz", "x.npz"],
    ["sample", "nothing", "--autoencoder", "{}", "--npz", "x.npz", "--num", "1"],
    ["sample", "nothing", "--scheduler", "{}"],
    ["sample", "nothing", "--respacing={}"],
    ["sample", "nothing", "--classes={}"],
    ["sample", "nothing", "--steps", "{}"],
    ["sample", "nothing", "{}"],
    ["sample", "nothing", "--wrong={}"],
    ["export", "{}", "out", "--format", "lora"],
    ["export", "nothing", "{}", "--format", "lora"],
    ["export", "nothing", "out", "--format", "{}"],
    ["export", "nothing", "out", "--format", "lora", "--push-to-hub", "{}"],
    ["evaluate", "{}"],
    ["evaluate", "{}", "--reference", "nothing"],
    ["evaluate", "nothing", "--reference", "{}"],
    ["evaluate", "nothing", "--reference", "nothing", "--features", "{}"],
    ["evaluate", "nothing", "--reference", "nothing", "--out", "{}"],
    ["evaluate", "nothing", "--nll", "--data", "{}"],
    ["compare", "{}", "nothing"],
    ["compare", "nothing", "{}"],
    ["encode", "nothing", "{}"],
    ["encode", "nothing", "out", "--pretrained", "{}"],
    ["encode", "digits", "out", "--split", "{}"],
    ["encode", "nothing", "out", "--precision", "{}"],
    ["doctor", "--preset", "{}"],
    ["launch", "local", "--ranks", "1", "{}"],
    ["launch", "local", "--ranks", "1", "--", "--preset", "{}"],
    ["launch", "hosts", "--hostfile", "{}", "--", "--preset", "digits"],
    ["launch", "slurm", "--nodes", "1", "--ranks-per-node", "1", "--name", "{}", "--", "--preset", "digits"],
    ["launch", "slurm", "--nodes", "1", "--ranks-per-node", "1", "--output", "{}", "--", "--preset", "digist"],
    ["launch", "slurm", "--nodes", "1", "--ranks-per-node", "1", "--sbatch", "{}", "--", "--preset", "digits"],
    ["launch", "k8s", "--nodes", "1", "--ranks-per-node", "1", "--image", "{}", "--", "--preset", "digits"],
    ["launch", "k8s", "--nodes", "1", "--ranks-per-node", "1", "--image", "a", "--pvc", "{}", "--"],
    ["compat", "dit", "--", "--data-path", "{}"],
    ["compat", "t2i", "--", "--pretrained_model_name_or_path", "{}", "--train_data_dir", "{}"],
    ["compat", "t2i-lora", "--", "--pretrained_model_name_or_path", "a/b", "--train_data_dir", "i", "--max_train_steps",
     "3", "--validation_prompt", "{}", "--report_to", "{}"],
    ["compat", "{}"],
    ["plan", "--preset", "digits", "--gpus", "{}"],
    ["plan", "--preset", "digits", "--gpus", "1xH100", "--json", "--output.project={}", "--data.path", "{}"],
    ["plan", "--preset", "digits", "--gpus", "1xH100", "--from", "{}"],
    ["train", "--preset", "digits", "--output.report_to", "{}"],
    ["train", "--preset", "digits", "--learning_rate", "{}"],
    ["report", "{}", "out.html"],
    ["report", "nothing", "{}"],
    ["ledger", "{}"],
    ["watch", "{}"],
    ["bench", "{}"],
    ["completion", "{}"],
    ["{}"],
]  # fmt: skip
TRAIN = [
    ["--preset", "{}"],
    ["--config", "{}"],
    ["--preset", "digits", "--deepspeed_config", "{}"],
    ["--preset", "digits", "--wrong={}"],
    ["--preset", "digits", "--samples", "{}"],
    ["--preset", "digits", "--resume", "{}"],
    ["--preset", "digits", "--objective.process", "{}"],
    *(
        ["--preset", "digits", "--dry-run", f"--{name}", "{}"]
        for name in (
            "pretrained.path", "output.folder", "output.project", "data.path", "data.cache", "validation.data",
            "performance.kernels", "lora.targets", "optim.name",
        )
    ),
]  # fmt: skip


def said_by(run: Callable[[Sequence[str]], object], argv: Sequence[str]) -> str:
    """What a command prints, with its end."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = run(argv)
        except SystemExit as end:
            code = end.code
    return f"{said.getvalue()}\nexit code {code}"


def check(run: Callable[[Sequence[str]], object], words: list[str], address: str, folder: Path) -> None:
    with contextlib.chdir(folder):
        said = said_by(run, [word.replace("{}", address) for word in words])
    assert SECRET not in said
    assert "Traceback" not in said
    assert not [path for path in folder.rglob("*") if SECRET in str(path)]


LINES = [*((commands.main, words) for words in FASTDIFF), *((train, words) for words in TRAIN)]
ALWAYS = [f"http://u:{SECRET}@h/x", f"https://h/x?sig={SECRET}", f"u:{SECRET}@h/x", f"http://u:s/{SECRET}@h/x"]
"""Of which a command line gets one, in turn."""


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("run", "words", "address"),
    [
        pytest.param(run, words, ALWAYS[number % len(ALWAYS)], id=" ".join(words))
        for number, (run, words) in enumerate(LINES)
    ],
)
def test_no_command_shows_credentials(
    run: Callable[[Sequence[str]], object], words: list[str], address: str, tmp_path: Path
) -> None:
    check(run, words, address, tmp_path)


@pytest.mark.nightly
@pytest.mark.fault(28)
@pytest.mark.parametrize(("run", "words"), LINES)
@BY_NIGHT
@given(address=ADDRESSES)
def test_more_addresses_show_no_credentials(
    run: Callable[[Sequence[str]], object], words: list[str], address: str, tmp_path: Path
) -> None:
    check(run, words, address, tmp_path)


@settings(max_examples=12, deadline=None)
@given(ADDRESSES, st.sampled_from(("--validation.data", "--data.path")))
def test_the_record_of_a_run_holds_no_credentials(address: str, flag: str) -> None:
    launch, config = train_flags.parse(["--preset", "digits", flag, address])
    assert SECRET not in json.dumps(run_record.as_json(config))
    assert SECRET not in json.dumps([sanitize.argument(word) for word in launch.argv])
    assert SECRET not in sanitize.argument(f"{flag}={address}")


@pytest.mark.parametrize("address", ["s3://bucket/a@2x/train", "https://h:8443/a@b/c", "s3://b/x@1/{00..99}.tar"])
def test_an_address_without_credentials_is_recorded_as_it_is(address: str) -> None:
    config = train_flags.parse(["--preset", "digits", "--data.path", address])[1]
    assert run_record.as_json(config)["data"]["path"] == address
    assert remote.resource(address) == address


def test_a_mistyped_flag_does_not_show_its_value() -> None:
    flags = ["--pretrained_model_name_or_path", "x", "--hub-token", SECRET]
    said = said_by(commands.main, ["compat", "t2i", "--", *flags])
    assert "--hub-token (did you mean --hub_token?)" in said
    assert SECRET not in said


@settings(max_examples=200, deadline=None)
@given(
    ADDRESSES,
    st.sampled_from(("{}", "'{}'", "cannot read {}: no file; see http://h/y", '("{}",)', "[{}] (a@b)", "a={}")),
)
def test_no_message_or_traceback_shows_credentials(address: str, around: str) -> None:
    text = around.format(address)
    assert SECRET not in sanitize.message(text)
    assert SECRET not in sanitize.message(repr(text))
    with pytest.raises(DataError) as caught:
        raise DataError(text) from OSError(2, "no such file", address)
    assert SECRET not in sanitize.message("".join(traceback.format_exception(caught.value)))


def test_a_bug_of_a_command_shows_no_credentials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its traceback passes the same redaction; the fault is put into the parser."""

    def fail() -> None:
        raise ZeroDivisionError(f"a bug at http:/u:{SECRET}@h/x")

    monkeypatch.setattr(commands, "_parser", fail)
    assert commands.main(["verify", "x"]) == 1
    said = capsys.readouterr().err
    assert "ZeroDivisionError: a bug at http:/h/x" in said
    assert SECRET not in said


def test_ordinary_messages_stay_as_they_are() -> None:
    for text in (
        "runs/a: no run (no run.json); runs there: b, c",
        "--batch.samples 64 is not divisible by 7 = 7 (--batch.micro) x 1 ranks; nearest values: 63, 70",
        'File "/a/b.py", line 3, in f\n    return sorted(found, key=step_of)',
        "claims:/data and data:/data:ro; user@host.org; 10:30 @ node-1; https://h:80/a/{0..9}.tar, http://[::1]:8/x",
        "/data/a:b@c/train.tar:12",
        "http://h:8080: refused; me@h",
        "num_tokens=128 keys=3 key_fn=foo monkey=5 monkey=abc tokenizer=clip runs/num_tokens=128",
    ):
        assert sanitize.message(text) == text


def test_a_local_folder_is_not_an_address(tmp_path: Path) -> None:
    local = (
        "a/b", "/a/b", "C:/a", "data:/data", "./http:/x", "runs/http", "org/model", "runs/lr:1e-4@b64", "/data/a:b@c",
        "//data/a@b", "a photo of: a cat @ home", "s3%20x", "50%25", "日本/ｗide",
    )  # fmt: skip
    assert not any(map(sanitize.is_address, local))
    assert [sanitize.address(path) for path in local] == [*local]
    addresses = ("http://h", "http:/h", "HTTPS://h", "s3:/b", "odd+x://h", "http:\\\\h", " http://h", "//u@h/x")
    assert all(map(sanitize.is_address, addresses))
    with contextlib.chdir(tmp_path):
        assert sanitize.address("u:p@h") == "***@h"
        Path("u:p@h").mkdir()
        assert sanitize.address("u:p@h") == "u:p@h", "a folder that is there"


NEW = ("runs/a;key=3", "exp:1@node3", "exp:12@node3/x", "./exp:a@node3", "./runs/a;key=abc", "../lr:x@b;token=y")
"""Folders that nobody takes for an address, before they exist."""
ODD = ("exp:a@node3", "here/a;key=abc", "here/x:y@z", "here/x?sig=abc")
"""Folders that are here, or whose first folder is."""


def test_a_relative_folder_with_an_odd_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("exp:a@node3", "here/a;key=abc", "here/x?sig=abc", f"exp:{SECRET}@node3", "exp:12@3@node3"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"with credentials.*begin that of a new folder with \./"):
            argument_types.local_path(text)
    Path("here").mkdir()
    Path("exp:a@node3").mkdir()
    for text in (*NEW, *ODD):
        assert argument_types.local_path(text) == Path(text)
        assert train_flags.parse(["--preset", "digits", "--output.folder", text])[1].output.folder == text
        assert sanitize.address(text) == text
    Path("here/a;token=abc").mkdir()
    for text in (
        "runs/a;key=3: done", "cannot open exp:1@node3", "in 'exp:1@node3', or exp:a@node3/x", "a;key=3.png",
        "fastdiff export 'runs/a;key=3' 'a;key=3-dit-training'", "in here/a;token=abc/checkpoints",
    ):  # fmt: skip
        assert sanitize.message(text) == text
    for text in (f"here/a;token={SECRET}", "here/x;token=12345", f"here/a;token=abc/x?sig={SECRET}"):
        assert "***" in sanitize.message(text)
        assert SECRET not in sanitize.message(text)
    for text in (f"here/http://u:{SECRET}@h", f"http:/u:{SECRET}@h/here", f"u:{SECRET}@here/x", f"here;u:{SECRET}@h"):
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            argument_types.local_path(text)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "form"),
    [
        ("--data.path", "http:\\\\u:{}@h\\x"),
        ("--validation.data", "//u:{}@h/x"),
        ("--data.path", "http:/u:{}@h/x"),
        ("--validation.data", "gs://u:{}@b/x"),
    ],
)
def test_an_address_that_nothing_can_open_starts_no_run(
    flag: str, form: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--preset", "digits", "--data.path", str(digits), "--output.folder", str(tmp_path / "run")]
    assert commands.main(["train", *words, flag, form.format(SECRET)]) == 2
    said = capsys.readouterr().err
    assert f"fastdiff: error: {flag} " in said
    assert "not an address that can be read; expected http://, https:// or s3://" in said
    assert SECRET not in said
    assert not (tmp_path / "run").exists()
