"""``fastdiff demo``: the kill, the resume and the comparison of every bit, and a demo that is stopped."""

import json
import os
import re
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from fastdiff.checkpoint.manifest import committed
from fastdiff.cli.demo.bits import compare
from fastdiff.errors import StorageError
from tests.support.injected.holding import HOLD, held_at
from tests.support.scripts import COMMAND, Launcher
from tests.support.waiting import wait_until

SMALL = ("--model.depth", "1", "--model.hidden", "32", "--model.heads", "2", "--output.sample-steps", "2")


def demo(digits: Path, runs: Path, steps: int, *more: str) -> Launcher:
    """A demo whose commands and ranks are forks."""
    words = ["demo", "--steps", str(steps), "--data", str(digits), "--runs", str(runs), "--", *SMALL, *more]
    return Launcher(COMMAND, *words, cwd=runs.parent)


@pytest.fixture(scope="module")
def shown(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The runs of a short demo, which waits for its kill at step 100, and what it says."""
    runs = tmp_path_factory.mktemp("demo") / "runs"
    runs.mkdir()
    log = runs / "demo-1.log"
    with ExitStack() as held:
        held.enter_context(held_at(100, runs / "demo-1"))
        with demo(digits, runs, 120, "--output.callbacks", HOLD) as script:
            ended = script.process
            wait_until(lambda: not ended.is_alive() or (log.exists() and "SIGKILL" in log.read_text()), "the kill")
            held.close()
            done = script.wait(550)
    assert done.code == 0, done.output
    return runs, done.output


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_ctrl_c_ends_it_and_its_training(digits: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    metrics = runs / "demo-1" / "metrics.jsonl"
    with demo(digits, runs, 10_000) as script:  # logged 60 times
        ended = script.process
        wait_until(lambda: not ended.is_alive() or (metrics.exists() and metrics.stat().st_size > 0), "a step")
        assert ended.is_alive(), script.wait().output
        assert ended.pid is not None
        os.killpg(ended.pid, signal.SIGINT)
        done = script.wait()
    said = done.output
    assert done.code == 75, said
    assert "interrupted; the runs of the demo stay" in said
    assert "Traceback" not in said
    assert list((runs / "demo-1" / "checkpoints").glob("step-*")), "the training saved before it ended"
