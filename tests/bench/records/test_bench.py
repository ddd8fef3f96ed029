"""Messages and tables that all benchmarks share."""

import argparse
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fastdiff_bench.__main__ import main
from fastdiff_bench.arguments import open_log
from fastdiff_bench.records import fingerprint, record
from fastdiff_bench.records.fingerprint import ROOT, Fingerprint
from fastdiff_bench.records.record import Failure
from fastdiff_bench.records.tables import table
from fastdiff_kernels import launch
from tests.support.injected.tiny_disk import fill, tiny_disk


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["aot", "philox"], "TRITON_INTERPRET is set: .*unset it"),
        (["op", "philox", "--device", "cuda"], "there is no CUDA device to measure on; use --device cpu"),
        (["op", "softmax"], "op 'softmax': expected some of philox, noising"),
        (["aot", "attention"], "op 'attention': expected some of philox, .*, adamw8bit"),
        (["op", "philox", "--dtype", "bf16"], "no case of philox has dtype bf16"),
    ],
)
def test_an_impossible_measurement_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


def test_a_table_has_aligned_columns() -> None:
    assert table([("name", "n"), ("a", "10")], "<>") == "name   n\na     10"


def test_the_fingerprint_names_the_commit_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench/fastdiff_bench/__main__.py", "op", "--smoke"])
    found = Fingerprint.here()
    assert found.command == "fastdiff bench op --smoke"
    assert re.fullmatch(r"unknown|[0-9a-f]{12}(-dirty)?", found.git)


def test_a_record_that_another_process_begins_at_the_same_time_is_its_own(tmp_path: Path) -> None:
    arguments = argparse.Namespace(out=tmp_path / "new", smoke=False)
    with ThreadPoolExecutor(8) as pool:
        logs = list(pool.map(lambda _: open_log(arguments, "op"), range(8)))
    for number, log in enumerate(logs):
        log.write(Failure(bench="op", case=str(number), provider="p", reason="none"))
        log.__exit__(None, None, None)
    assert {log.path.name for log in logs} == {"op.jsonl", *(f"op-{number}.jsonl" for number in range(2, 9))}
    assert [record.read(log.path).failures[0].case for log in logs] == [str(number) for number in range(8)]


def test_a_record_leaves_the_picture_of_another_one(tmp_path: Path) -> None:
    (tmp_path / "objectives.png").write_text("of the user")
    with open_log(argparse.Namespace(out=tmp_path, smoke=False), "objectives") as log:
        assert log.path == tmp_path / "objectives-2.jsonl"


def test_a_record_on_a_full_disk_names_its_file(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 0.25) as disk:
        log = open_log(argparse.Namespace(out=disk, smoke=False), "op")
        fill(disk)
        with pytest.raises(OSError, match=r"No space left on device: .*op\.jsonl"):
            log.write(Failure(bench="op", case="more than a block" * 300, provider="p", reason="none"))
        (disk / "ballast").unlink()
        log.__exit__(None, None, None)


def test_the_commit_is_given_where_there_is_no_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fingerprint, "CLONE", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("FASTDIFF_COMMIT", raising=False)
    assert Fingerprint.here().git == "unknown"
    monkeypatch.setenv("FASTDIFF_COMMIT", "0123456789ab")
    assert Fingerprint.here().git == "0123456789ab"


@pytest.mark.nightly
def test_kernels_are_measured_without_deepspeed() -> None:
    code = "import sys, fastdiff_bench.commands.op, fastdiff_bench.commands.aot; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0
