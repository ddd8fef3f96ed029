"""Processor time of a program's processes until it has taken a step: real processes, with known work."""

import sys
from pathlib import Path

import psutil
import pytest

from fastdiff_bench import BenchError
from fastdiff_bench.measure.first_step import environment, start

WORK = "import time\nwhile time.process_time() < {seconds}: pass\n"
TREE = """
import pathlib, subprocess, sys, time
subprocess.run([sys.executable, "-c", {ended!r}], check=True)
living = subprocess.Popen([sys.executable, "-c", {living!r}], stdout=subprocess.PIPE)
living.stdout.readline()
pathlib.Path({pid!r}).write_text(str(living.pid))
pathlib.Path({mark!r}).touch()
time.sleep(3600)
"""


@pytest.mark.nightly
def test_every_process_counts_also_one_that_has_ended(tmp_path: Path) -> None:
    mark, pid = tmp_path / "mark", tmp_path / "pid"
    living = WORK.format(seconds=0.4) + "print(flush=True)\ntime.sleep(3600)"
    code = TREE.format(ended=WORK.format(seconds=0.3), living=living, pid=str(pid), mark=str(mark))
    found = start([sys.executable, "-c", code], mark.exists, tmp_path / "log", environment(1), 60.0)
    assert found.cpu_seconds > 0.65
    assert found.processes == 2
    assert found.seconds > 0.65
    assert not psutil.pid_exists(int(pid.read_text()))


def test_a_program_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(BenchError, match=r"ended with code 1 before a step:\nno such model"):
        start(command, (tmp_path / "mark").exists, tmp_path / "log", environment(1), 60.0)


def test_a_program_that_takes_no_step_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    with pytest.raises(BenchError, match="took no step within 0 s"):
        start(command, (tmp_path / "mark").exists, tmp_path / "log", environment(1), 0.2)


def test_the_variables_of_a_launcher_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert "RANK" not in environment(2)
    assert environment(2)["OMP_NUM_THREADS"] == "2"
