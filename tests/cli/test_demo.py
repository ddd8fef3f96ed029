"""``fastdiff demo``: the kill, the resume and the comparison of every bit, and a demo that is stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from fastdiff.checkpoint.manifest import committed
from fastdiff.cli.demo.bits import compare
from fastdiff.cli.demo.training import FASTDIFF
from fastdiff.errors import StorageError
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SMALL = ("--model.depth", "1", "--model.hidden", "32", "--model.heads", "2", "--output.sample-steps", "2")


def start(digits: Path, runs: Path, steps: int, **options: object) -> subprocess.Popen[str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK", "WORLD_"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), outer.get("PYTHONPATH", "")])
    command = [*FASTDIFF, "demo", "--steps", str(steps), "--data", str(digits), "--runs", str(runs), "--", *SMALL]
    return subprocess.Popen(
        command, cwd=runs.parent, env=outer | {"PYTHONPATH": path}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, **options,
    )  # type: ignore[call-overload,no-any-return]  # fmt: skip


@pytest.fixture(scope="module")
def shown(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The runs of a short demo, and what it says."""
    runs = tmp_path_factory.mktemp("demo") / "runs"
    process = start(digits, runs, 120)
    said, _ = process.communicate(timeout=550)
    assert process.returncode == 0, said
    return runs, said


def test_it_kills_resumes_and_finds_no_bit_that_differs(shown: tuple[Path, str]) -> None:
    runs, said = shown
    assert re.search(r"At step \d+ rank 0 got a SIGKILL", said), said
    assert "SIGKILL" in (runs / "demo-1.log").read_text()
    assert re.search(r"\d+ tensors with [\d,]+ numbers of step 120 .*: 0 bits differ", said), said
    flags = [json.loads((runs / name / "run.json").read_text())["argv"] for name in ("demo-1", "demo-1-undisturbed")]
    assert [flag for flag in flags[0] if flag not in flags[1]] == [str(runs / "demo-1")]
    assert (runs / "demo-1" / "samples" / "step-00000120.png").exists()
    assert (runs / "demo-1" / "report.html").stat().st_size > 10_000
    assert "accuracy" in said
    assert said.count("\nOK ") + said.count("\nPROBLEM") >= 3


def test_one_flipped_bit_is_found(shown: tuple[Path, str], tmp_path: Path) -> None:
    runs, _ = shown
    for name in ("demo-1", "demo-1-undisturbed"):
        shutil.copytree(runs / name, tmp_path / name)
    assert compare(tmp_path / "demo-1", tmp_path / "demo-1-undisturbed").bits == 0
    file = next(committed(tmp_path / "demo-1" / "checkpoints")[0].glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 0b100
    file.write_bytes(content)
    assert compare(tmp_path / "demo-1", tmp_path / "demo-1-undisturbed").bits == 1
    shutil.rmtree(tmp_path / "demo-1" / "checkpoints")
    with pytest.raises(StorageError, match="expected checkpoints of the same step"):
        compare(tmp_path / "demo-1", tmp_path / "demo-1-undisturbed")


def test_ctrl_c_ends_it_and_its_training(digits: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = start(digits, runs, 10_000, start_new_session=True)  # logged 60 times
    metrics = runs / "demo-1" / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size > 0), "a step", 300)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 75, said
    assert "interrupted; the runs of the demo stay" in said
    assert "Traceback" not in said
    assert list((runs / "demo-1" / "checkpoints").glob("step-*")), "the training saved before it ended"
