"""What every benchmark shares: messages and tables."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from bench.__main__ import main
from bench.fingerprint import ROOT, Fingerprint
from bench.table import table
from fastdiff_kernels import launch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["aot", "philox"], "TRITON_INTERPRET is set: .*unset it"),
        (["op", "philox", "--device", "cuda"], "there is no CUDA device to measure on; use --device cpu"),
        (["op", "softmax"], "op 'softmax': expected some of philox, noising"),
        (["aot", "attention"], "op 'attention': expected some of philox, .*, adamw8bit$"),
        (["op", "philox", "--dtype", "bf16"], "no case of philox has dtype bf16"),
    ],
)
def test_what_cannot_be_measured_here_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])


def test_a_table_has_aligned_columns() -> None:
    assert table([("name", "n"), ("a", "10")], "<>") == "name   n\na     10"


def test_the_fingerprint_names_the_commit_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench/__main__.py", "op", "--smoke"])
    fingerprint = Fingerprint.here()
    assert fingerprint.command == "python -m bench op --smoke"
    assert re.fullmatch(r"unknown|[0-9a-f]{12}(-dirty)?", fingerprint.git)


def test_kernels_are_measured_without_deepspeed() -> None:
    code = "import sys, bench.__main__; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0
