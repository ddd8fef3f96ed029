"""No more threads or processes may be started: one message with the limit, whichever library notices it."""

import errno
import faulthandler
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdiff import process_limits
from fastdiff.errors import ProcessLimitError, explained
from fastdiff.parallel.launcher import VARIABLES
from tests.support.forked import fork_server
from tests.support.injected.no_threads import forbid_threads

ROOT = Path(__file__).parents[1]
TRAIN = [str(ROOT / "fastdiff" / "train.py"), "--preset", "digits"]
_WITHOUT_THREADS = """
import os, sys
from tests.support.injected.no_threads import forbid_threads
forbid_threads()
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
COMMAND = ["-c", "from fastdiff.cli.main import entry; entry()"]


@pytest.mark.parametrize(
    "words",
    [
        TRAIN,
        ["-m", "fastdiff.cluster.supervisor.main", "--ranks-per-node", "1", "--", *TRAIN[1:]],
        [*COMMAND, "train", *TRAIN[1:]],
        [*COMMAND, "encode", "digits", "out"],
        [*COMMAND, "sample", "run", "--classes", "0"],
        [*COMMAND, "watch", "run"],
        [*COMMAND, "verify", "run"],
    ],
    ids=lambda words: " ".join(words[1:3]),
)
def test_a_command_without_threads_says_so_before_its_libraries_end_it(words: list[str], tmp_path: Path) -> None:
    """OpenMP would end the process with 1, OpenBLAS by a SIGINT that looks like Ctrl-C."""
    # The filter outlives the exec; a process as large as that of the tests may not be forked.
    command = [sys.executable, "-c", _WITHOUT_THREADS, *words]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == ProcessLimitError.exit_code == 71, done.stderr
    [line] = done.stderr.splitlines()
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    assert line.startswith("fastdiff: error: no more threads or processes may be started (")
    assert f"ulimit -u is {soft}" in line or soft == resource.RLIM_INFINITY
    assert list(tmp_path.iterdir()) == []


def test_a_command_without_threads_of_its_own_needs_none(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITHOUT_THREADS, *COMMAND, "--version"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_would_block_is_no_limit() -> None:
    assert not process_limits.is_reached(BlockingIOError(errno.EAGAIN, "write could not complete without blocking"))
    assert not process_limits.is_reached(RuntimeError(f"recv: {os.strerror(errno.EAGAIN)}"))
    assert process_limits.is_reached(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)))


def _thread() -> None:
    threading.Thread(target=print).start()


def _process() -> None:
    subprocess.run(["true"], check=True)


def _fork() -> None:
    os.fork()


def _watchdog() -> None:
    faulthandler.dump_traceback_later(1000)


def _is_explained(start: Callable[[], None]) -> None:
    forbid_threads()
    try:
        start()
    except Exception as error:
        if isinstance(explained(error), ProcessLimitError):
            sys.exit(71)
        raise


@pytest.mark.parametrize("start", [_thread, _process, _fork, _watchdog])
def test_a_limit_that_is_reached_later_is_explained(start: Callable[[], None]) -> None:
    child = fork_server().Process(target=_is_explained, args=(start,))
    child.start()
    child.join(120)
    assert child.exitcode == 71


def test_the_smallest_limit_above_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a container is in a group above the one of the process."""
    for name, limit in (("", "max"), ("outer", "512"), ("outer/inner", "4096")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "pids.max").write_text(f"{limit}\n")
    (tmp_path / "groups").write_text("1:cpu:/other\n0::/outer/inner\n")
    monkeypatch.setattr(process_limits, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(process_limits, "_CONTROLLERS", tmp_path)
    assert process_limits.limits().endswith("pids.max of its cgroup is 512")
