"""Every exit of a job prints one message, whichever rank is the slowest, before a launcher kills the others."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fastdiff import errors
from fastdiff.errors import DataError
from fastdiff.exit_message import say_once
from fastdiff.parallel import heartbeat
from fastdiff.parallel.world import World
from fastdiff.training import loop
from tests.support.forked import Ranks
from tests.support.processes import ROOT
from tests.support.runs import flags, tiny
from tests.support.waiting import wait_until

trainer = import_module("fastdiff.train")  # the package has a function of that name, too
_DELAY_S = 1.0
"""Delay of a rank that the others wait for, long enough for a second message to appear."""


# --- ranks that end, one of them late ---------------------------------------------------------------------------


def _rank(world: World, argv: list[str], fault: str, slow: int, where: str, folder: Path) -> None:
    """End as ``fastdiff/train.py`` does, with the output of all ranks in one file; rank ``slow`` is held up."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    (folder / f"{world.rank}.pid").write_text(str(os.getpid()))
    world.raise_on_all(None)  # a rank that is late reads those of the others
    if world.rank == slow:
        for module, name in _PLACES[where]:
            setattr(module, name, _late(getattr(module, name), folder, world))
    heartbeat._GIL_S = 600.0  # on a loaded machine, too, the thread that prints is first
    trainer._GRACE_S = 0.0 if fault == "rank 1 is killed" else 60.0
    _FAULTS[fault](world)
    os._exit(trainer.main(argv))


_PLACES: dict[str, list[tuple[Any, str]]] = {
    "before": [(trainer, "_report")],
    "printing": [(trainer, "write_line"), (errors, "write_line")],
}
"""Where a rank is held up: before it asks whether it may speak, or when it may and has not yet spoken."""


def _late(action: Callable[..., Any], folder: Path, world: World) -> Callable[..., Any]:
    """``action`` after another rank has ended, or could have."""

    def wait(*arguments: Any) -> Any:
        others = [folder / f"{rank}.pid" for rank in range(world.size) if rank != world.rank]
        until = time.monotonic() + _DELAY_S
        while time.monotonic() < until and all(_runs(int(path.read_text())) for path in others):
            time.sleep(0.01)
        return action(*arguments)

    return wait


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _raise_in_a_step(rank: int | None, error: Callable[[], BaseException]) -> Callable[[World], None]:
    """Let a rank, or all of them, fail in the second step."""

    def install(world: World) -> None:
        if rank not in (None, world.rank):
            return
        original, calls = loop.Callbacks.on_step, []

        def on_step(self: Any, state: Any) -> None:
            original(self, state)
            calls.append(state)
            if len(calls) == 2:
                raise error()

        loop.Callbacks.on_step = on_step  # type: ignore[method-assign]

    return install


class _Killed(BaseException):
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _signal_in_a_step(world: World) -> None:
    original = loop.Callbacks.on_step

    def on_step(self: Any, state: Any) -> None:
        if state.progress.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            # A thread takes the signal, and starts this one.
            wait_until(lambda: any(thread.name == "notice" for thread in threading.enumerate()), "the request")
        original(self, state)

    loop.Callbacks.on_step = on_step  # type: ignore[method-assign]


def _signal_at_the_start(world: World) -> None:
    original = loop.build

    def build_run(*arguments: Any) -> Any:
        world.gather(0)  # all ranks are there
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
        return original(*arguments)

    loop.build = build_run


_FAULTS: dict[str, Callable[[World], None]] = {
    "none": lambda world: None,
    "data of rank 1": _raise_in_a_step(1, lambda: DataError("damaged sample")),
    "storage of rank 1": _raise_in_a_step(1, lambda: OSError(28, "No space left on device", "file")),
    "bug of all": _raise_in_a_step(None, lambda: ZeroDivisionError("a bug")),
    "bug of rank 1": _raise_in_a_step(1, lambda: RuntimeError("a bug of the shapes")),
    "Ctrl-C": _raise_in_a_step(None, KeyboardInterrupt),
    "rank 1 hangs": _raise_in_a_step(1, lambda: time.sleep(600)),  # type: ignore[arg-type,return-value]
    "rank 1 is killed": _raise_in_a_step(1, _Killed),
    "signals in a step": _signal_in_a_step,
    "signals at the start": _signal_at_the_start,
}


def ends(folder: Path, argv: list[str], fault: str, slow: int, where: str, ranks: int) -> tuple[int, set[int], str]:
    """Return what the first rank that ended badly ended with, the codes of all that ended by themselves, the output.

    As from DeepSpeed's launcher, the others get SIGTERM at once; after the kill of rank 1 they come to their own end.
    """
    killed = fault == "rank 1 is killed"
    with Ranks(_rank, argv, fault, slow, where, folder, ranks=ranks) as running:
        deadline = time.monotonic() + 240
        while True:
            alive = any(p.is_alive() for p in running.processes)  # before the codes: both ranks may end in between
            if codes := [p.exitcode for p in running.processes if p.exitcode]:
                break
            assert alive, "all ended well"
            assert time.monotonic() < deadline, "no rank has ended"
            time.sleep(0.005)
        if not killed:
            running.kill(signal.SIGTERM)
        for process in running.processes:
            process.join(120)
        by_themselves = {p.exitcode for p in running.processes if p.exitcode is not None and p.exitcode >= 0}
        first = running.processes[1].exitcode if killed else codes[0]
    return first or 0, by_themselves, (folder / "log").read_text()


CASES = {
    "a wrong preset": (2, "none", {"preset": "digist"}, "did you mean digits?"),
    "a wrong flag": (2, "none", {"optim.lrr": "1"}, "--optim.lrr: unknown flag, did you mean"),
    "a run that is not there": (2, "none", {"resume": "must"}, "no checkpoint"),
    "no data": (65, "none", {"data.path": "/nothing"}, "fastdiff encode"),
    "a damaged sample": (65, "data of rank 1", {}, "fastdiff: error (rank 1): damaged sample"),
    "losses that are no numbers": (70, "none", {"optim.lr": "1e38"}, "had to be skipped"),
    "a full disk": (74, "storage of rank 1", {}, "fastdiff: error (rank 1): file: No space left on device"),
    "no folder": (74, "none", {"output.folder": "/dev/null/run"}, "Not a directory"),
    "a request to stop": (75, "signals in a step", {}, "the same command resumes from there"),
    "an early request to stop": (75, "signals at the start", {}, "SIGTERM before the first step"),
    "an interrupt": (130, "Ctrl-C", {}, "interrupted, not saved"),
    "a hang": (1, "rank 1 hangs", {"hang-timeout": "2"}, "no progress for"),
    "a bug": (1, "bug of all", {}, "ZeroDivisionError: a bug"),
    "a bug of one rank": (1, "bug of rank 1", {}, "RuntimeError: a bug of the shapes"),
}
_TRIALS = [
    *((case, 2, slow, "before") for case in CASES for slow in range(2)),
    *((case, 2, 0, "printing") for case in ("a wrong flag", "a run that is not there", "a bug")),
    ("a damaged sample", 2, 1, "printing"),
    *((case, 3, slow, "before") for case in ("a run that is not there", "a damaged sample") for slow in range(3)),
]
_BY_DAY = {
    *((case, 2, number % 2, "before") for number, case in enumerate(CASES)),
    ("a wrong flag", 2, 0, "printing"),
    ("a damaged sample", 3, 2, "before"),
}
"""Every case, every rank and every place; all of them together by night."""


@pytest.mark.parametrize(
    ("case", "ranks", "slow", "where"),
    [pytest.param(*trial, marks=[] if trial in _BY_DAY else pytest.mark.nightly) for trial in _TRIALS],
)
def test_one_message_whichever_rank_is_slow(
    digits: Path, tmp_path: Path, case: str, ranks: int, slow: int, where: str
) -> None:
    code, fault, changes, message = CASES[case]
    config = tiny(digits, tmp_path / "run", steps=6, batch__samples=12)
    argv = flags(config)
    for name, value in changes.items():
        argv += [f"--{name}", value]
    first, codes, output = ends(tmp_path, argv, fault, slow, where, ranks)
    assert (first, codes) == (code, {code}), output
    assert output.count(message) == 1, output
    errors = output.count("fastdiff: error") + output.count("Traceback")
    assert errors == (code not in (75, 130)), "what was asked for is no error"
    assert "ERROR" not in output


def test_a_rank_that_loses_a_killed_one_says_so(digits: Path, tmp_path: Path) -> None:
    argv = flags(tiny(digits, tmp_path / "run", steps=6, batch__samples=12))
    code, codes, output = ends(tmp_path, argv, "rank 1 is killed", 0, "before", 3)
    assert code == -signal.SIGKILL
    assert codes == {1}
    assert output.count("ERROR lost the connection to another rank") == 1, output
    assert "Traceback" not in output


# --- the lock ------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files of a job of two ranks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    return tmp_path / f"fastdiff-{os.getuid()}"


def test_the_code_is_that_of_the_message(job: Path) -> None:
    said: list[str] = []
    assert say_once(65, lambda: said.append("first")) == 65
    assert say_once(2, lambda: said.append("second")) == 65
    assert said == ["first"]


def test_a_rank_that_ends_before_it_has_spoken_leaves_it_to_the_next(job: Path) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        say_once(65, fail)
    said: list[str] = []
    assert say_once(2, lambda: said.append("second")) == 2
    assert said == ["second"]


def test_another_job_speaks_for_itself_and_cleans_up(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say_once(65, lambda: None)
    ended = job / "4194305-1.0-127.0.0.1-1"  # a process that cannot be
    ended.touch()
    monkeypatch.setenv("MASTER_PORT", "1")
    assert say_once(2, lambda: None) == 2
    assert not ended.exists()
    assert len(list(job.iterdir())) == 2, "the launcher of both is alive"


def test_an_earlier_job_of_the_same_launcher_is_another_one(job: Path) -> None:
    """As of a shell, without a port."""
    code = "from fastdiff.exit_message import say_once; print(say_once(65, lambda: print('said')))"
    environment = {"PATH": "", "WORLD_SIZE": "2", "TMPDIR": str(job.parent)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.stdout == "said\n65\n", done.stderr
    assert len(list(job.iterdir())) == 1


def test_a_folder_of_others_is_not_used(job: Path) -> None:
    job.mkdir(mode=0o777)
    job.chmod(0o777)
    said: list[str] = []
    assert [say_once(code, lambda: said.append("each")) for code in (65, 2)] == [65, 2]
    assert len(said) == 2, "rather twice than never"
