"""The supervisor of a node with real ranks: it names the first failure, and no rank hangs or is left behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fastdiff.checkpoint.manifest import committed, verify
from fastdiff.cluster.supervisor.environment import request_nccl_dumps
from fastdiff.cluster.supervisor.main import main
from fastdiff.cluster.supervisor.outcome import UNAVAILABLE, of_hang
from fastdiff.cluster.supervisor.ranks import RankStatus
from fastdiff.cluster.supervisor.signals import Signals
from fastdiff.cluster.supervisor.watch import Limits, Watch
from fastdiff.exit_message import NODE_FOLDER
from fastdiff.parallel import heartbeat
from fastdiff.train import _GRACE_S
from tests.support.processes import ROOT
from tests.support.runs import flags, tiny
from tests.support.servers.ports import reserved_port
from tests.support.supervised import Supervised, end, processes_of
from tests.support.waiting import LIMIT_S, wait_for_the_end, wait_until

STEPS = 100_000
"""More than any test lets it take."""
HANG_S = 15
PLAIN = ("--ranks-per-node", "2", "--no-preflight")
LOCK_THE_INTERPRETER = """
import ctypes, os, pathlib, threading, time

def lock():
    while not pathlib.Path(os.environ["LOCK_FILE"]).exists():
        time.sleep(0.05)
    pathlib.Path(os.environ["LOCK_FILE"]).with_name("locks").touch()
    ctypes.PyDLL(None).sleep(3600)  # PyDLL: without letting the interpreter's lock go

if os.environ.get("RANK") == "1":
    threading.Thread(target=lock, daemon=True).start()
"""
WAIT_FOR_THE_SUPERVISOR = f"""
import time

def patient(seconds, sleep=time.sleep):
    sleep(3600 if seconds == {_GRACE_S} else seconds)

time.sleep = patient
"""
"""A rank that has lost another one gives the supervisor an hour to end it."""
RANKS_WAIT = """
import os, signal

if "RANK" in os.environ:
    signal.pause()
"""
"""No rank begins."""

CASES: dict[str, list[object]] = {
    "number": [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT],
    "victim": [None, 0, 1],
    "hang": ["stopped", "locked"],
    "far": ["killed", "stopped", "unreachable"],
    "lost": [0, 1],
    "ranks": ["1", "2"],
}
"""The first of each in every run of the tests, all of them by night."""

Start = Callable[..., Supervised]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, values in CASES.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values if metafunc.config.getoption("--nightly") else values[:1])


@pytest.fixture
def start(digits: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a supervisor of an endless run."""
    started = []

    def supervised(
        *options: str, node: int = 0, more: Sequence[str] = (), output: Path | None = None, **environment: str
    ) -> Supervised:
        run = tmp_path / "run"
        argv = [*flags(tiny(digits, run, steps=STEPS)), "--hang-timeout", str(HANG_S), *more]
        started.append(Supervised(run, argv, *(options or PLAIN), node=node, environment=environment, output=output))
        return started[-1]

    yield supervised
    end(started)


def site(folder: Path, code: str) -> str:
    """Return a PYTHONPATH with which every Python runs this code at its start."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(code)
    return os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])


def ended_or_silent_for_hours(supervised: Supervised, beats: Path) -> bool:
    """Whether a supervisor has ended; while it has not, let the last beat of a rank be two hours old."""
    with suppress(FileNotFoundError), beats.open("r+b", buffering=0) as file:
        step, phase, at_s = heartbeat._BEAT.unpack(file.read())
        if time.monotonic() - at_s < 3600:
            file.seek(0)
            file.write(heartbeat._BEAT.pack(step, phase, at_s - 7200))
    return supervised.process.poll() is not None


def two_nodes(start: Start, *options: str) -> tuple[Supervised, Supervised]:
    port = str(reserved_port())
    both = ("--nodes", "2", "--ranks-per-node", "1", "--master", "127.0.0.1", "--port", port, *options)
    return start(*both, node=0), start(*both, node=1)


@pytest.mark.fault(13)
def test_a_killed_rank_is_named_and_ends_the_others(start: Start, tmp_path: Path) -> None:
    supervised = start(more=["--hang-timeout", "3600"], PYTHONPATH=site(tmp_path, WAIT_FOR_THE_SUPERVISOR))
    supervised.wait_for_steps(3)
    rank = supervised.rank(1)
    rank.send_signal(signal.SIGKILL)
    assert supervised.wait() == 128 + signal.SIGKILL
    assert supervised.last_line.startswith("fastdiff: rank 1 (node 0 on ")
    assert supervised.last_line.endswith(f"process {rank.pid}) failed first: killed by SIGKILL")
    assert processes_of(supervised.run) == []


@pytest.mark.fault(14)
def test_a_rank_that_hangs_is_named_with_the_stacks_of_the_others(start: Start, tmp_path: Path, hang: str) -> None:
    """Also a rank that holds the interpreter's lock: it does not beat, and its stacks are written without the lock."""
    lock = {"PYTHONPATH": site(tmp_path, LOCK_THE_INTERPRETER), "LOCK_FILE": str(tmp_path / "now")}
    supervised = start(more=["--hang-timeout", "3600"], **lock)
    supervised.wait_for_steps(3)
    if hang == "stopped":
        rank = supervised.rank(1)
        rank.send_signal(signal.SIGSTOP)
        wait_until(lambda: rank.status() == psutil.STATUS_STOPPED, "the stop of rank 1")
    else:
        (tmp_path / "now").touch()
        wait_until((tmp_path / "locks").exists, "the lock of the interpreter")
    (beats,) = tmp_path.glob("fastdiff-*/0/rank-00001.beat")
    wait_until(lambda: ended_or_silent_for_hours(supervised, beats), "the end of a hang")
    assert supervised.wait() == UNAVAILABLE
    assert "take_steps" in (supervised.run / "stacks" / "rank-00000.txt").read_text()
    if hang == "stopped":
        assert supervised.last_line.startswith("fastdiff: rank 1 (node 0 on ")
        assert "failed first: stopped from outside" in supervised.last_line
    else:
        assert "failed first: hanging (state" in supervised.last_line
        assert "in lock" in (supervised.run / "stacks" / "rank-00001.txt").read_text()
    assert processes_of(supervised.run) == []


@pytest.mark.fault(12)
def test_a_signal_reaches_all_ranks_which_save_one_step(start: Start, number: signal.Signals, nightly: bool) -> None:
    for _ in range(5 if nightly else 1):
        supervised = start()
        supervised.wait_for_steps(3)
        supervised.process.send_signal(number)
        assert supervised.wait() == 75
        assert supervised.last_line == "fastdiff: stopped as requested; the same command resumes the run (exit code 75)"
        [step, *_] = committed(supervised.run / "checkpoints")
        assert not verify(step)
        assert processes_of(supervised.run) == []
        shutil.rmtree(supervised.run)  # the next one waits for steps of its own


def test_a_signal_before_the_ranks_have_begun_ends_them_too(start: Start, tmp_path: Path) -> None:
    supervised = start(PYTHONPATH=site(tmp_path, RANKS_WAIT))
    wait_until(lambda: bool(psutil.Process(supervised.process.pid).children()), "the ranks to start")
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 75
    assert not (supervised.run / "metrics.jsonl").exists()
    assert processes_of(supervised.run) == []


def test_a_signal_during_the_pre_flight_leaves_no_probe(start: Start) -> None:
    """Of a data set whose server does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/digits"
        supervised = start("--ranks-per-node", "1", more=["--hang-timeout", "3600", "--data.path", url])
        connection, _ = server.accept()
        with connection:
            supervised.process.send_signal(signal.SIGTERM)
            assert supervised.wait() == 75, supervised.output
    assert not list(supervised.run.glob(".preflight-*"))
    assert processes_of(supervised.run) == []


@pytest.mark.nightly
@pytest.mark.fault(12)
def test_ranks_of_a_killed_supervisor_save_and_end(start: Start, victim: int | None) -> None:
    """The kernel tells them. A supervisor of another node, if there is one, exits as they do."""
    nodes = (start(),) if victim is None else two_nodes(start, "--no-preflight")
    nodes[0].wait_for_steps(3)
    nodes[victim or 0].process.send_signal(signal.SIGKILL)
    if victim is not None:
        assert nodes[1 - victim].wait() == 75
    wait_until(lambda: not processes_of(nodes[0].run), "all ranks to end")
    [step] = committed(nodes[0].run / "checkpoints")
    assert not verify(step)


@pytest.mark.fault(13)
def test_two_nodes_print_the_same_last_line(start: Start, far: str) -> None:
    """After the pre-flight; what fails is on the other node, or that node as a whole."""
    first, second = two_nodes(start)
    first.wait_for_steps(3)
    rank = second.rank(1)
    rank.send_signal(signal.SIGKILL if far == "killed" else signal.SIGSTOP)
    if far == "unreachable":
        second.process.send_signal(signal.SIGSTOP)
        assert first.wait() == UNAVAILABLE
        assert first.last_line.startswith("fastdiff: node 1 on ")
        return
    assert {first.wait(), second.wait()} == {128 + signal.SIGKILL if far == "killed" else UNAVAILABLE}
    assert first.last_line == second.last_line
    assert first.last_line.startswith("fastdiff: rank 1 (node 1 on ")
    if far == "stopped":
        assert "stopped from outside" in first.last_line
        assert "take_steps" in (first.run / "stacks" / "rank-00000.txt").read_text()
    assert processes_of(first.run) == []


@pytest.mark.fault(13)
def test_a_node_that_dies_as_a_whole_is_named(start: Start, lost: int) -> None:
    """Not the rank of another node, whose connection to it was cut."""
    nodes = two_nodes(start, "--no-preflight")
    nodes[0].wait_for_steps(3)
    rank = nodes[lost].rank(lost)
    nodes[lost].process.send_signal(signal.SIGSTOP)  # so that it does not ask its rank to save
    for process in (rank, nodes[lost].process):
        process.send_signal(signal.SIGKILL)
    left = nodes[1 - lost]
    assert left.wait() == UNAVAILABLE, left.output
    assert left.last_line.startswith(f"fastdiff: node {lost} "), left.last_line
    assert "no contact for" in left.last_line


@pytest.mark.fault(12)
def test_a_run_whose_output_nobody_reads_is_saved(start: Start, tmp_path: Path, ranks: str) -> None:
    """As of ``fastdiff launch ... | tee log`` when tee is gone; two ranks save one step."""
    os.mkfifo(tmp_path / "output")
    reader = os.open(tmp_path / "output", os.O_RDONLY | os.O_NONBLOCK)
    supervised = start("--ranks-per-node", ranks, "--no-preflight", output=tmp_path / "output")
    supervised.wait_for_steps(3)
    os.close(reader)
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 75
    [step, *_] = committed(supervised.run / "checkpoints")
    assert not verify(step)
    assert len(list(step.glob("rank-*"))) == int(ranks)
    assert processes_of(supervised.run) == []


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals.take(120) == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_dumps_of_nccl_are_asked_for(tmp_path: Path) -> None:
    """Through the pipe of each rank (here a FIFO without NCCL), and not of one that is gone."""
    node_folder, run = tmp_path / "node", tmp_path / "run"
    node_folder.mkdir()
    for rank in range(2):
        os.mkfifo(node_folder / f"nccl-{rank}.pipe")
    reader = os.open(node_folder / "nccl-0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        request_nccl_dumps(node_folder, run)
        assert os.read(reader, 16) == b"1"
    finally:
        os.close(reader)
    assert (run / "nccl").is_dir()


@pytest.mark.fault(13)
def test_the_error_of_a_rank_is_said_once(start: Start, ranks: str) -> None:
    """With two ranks the supervisor says whose error it is, and does not repeat it."""
    supervised = start("--ranks-per-node", ranks, "--no-preflight", more=["--resume", "must"])
    assert supervised.wait() == 2
    assert supervised.output.count("--resume must") == 1, supervised.output
    last = (
        r"fastdiff: error: --resume must" if ranks == "1" else r"fastdiff: rank [01] \(.*\) failed first: exit code 2$"
    )
    assert re.match(last, supervised.last_line), supervised.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--", "--preset", "nonesuch"], "nonesuch"),
        (["--nodes", "2", "--", "--preset", "digits"], "--port is missing"),
        (["--node-rank", "1", "--", "--preset", "digits"], "--node-rank 1: expected 0 to 0"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(
    capfd: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert main(["--ranks-per-node", "2", *arguments]) == 2
    assert complaint in capfd.readouterr().err


def test_a_port_that_is_taken_is_named(digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the supervisor of another job, most likely."""
    argv = ["--", *flags(tiny(digits, tmp_path / "run"))]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["--ranks-per-node", "2", "--port", port, *argv]) == UNAVAILABLE
    assert f"--master 127.0.0.1 --port {port}: cannot listen there" in capfd.readouterr().err


def test_a_child_dies_with_the_process_that_started_it() -> None:
    """Before it has run a line of its own; and in a group that can be ended as a whole."""
    code = "import sys, time; from fastdiff.cluster.supervisor.ranks import spawn; import os\n"
    code += "print(spawn(['/bin/sleep', '600'], os.environ).pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for_the_end([child])


def status(rank: int, **changes: object) -> RankStatus:
    values: dict[str, object] = {"process": 100 + rank, "state": "S", "step": 7, "phase": "backward", "age_s": 15.0}
    return RankStatus(rank=rank, **{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("culprit", "why"),
    [
        ({"state": "T", "step": 9, "age_s": 15.0}, "stopped, though ahead"),
        ({"step": 6, "phase": "end"}, "a step behind"),
        ({"phase": "forward"}, "a phase behind"),
        ({"age_s": 15.5}, "silent for longest"),
        ({"step": -1, "phase": "start"}, "no beat yet"),
    ],
)
def test_the_culprit_of_a_hang(culprit: dict[str, object], why: str) -> None:
    statuses = {"node 0 on a": [status(0), status(1)], "node 1 on b": [status(2), status(3, **culprit)]}
    outcome = of_hang(statuses, [], 15.0, Path("runs/x"))
    assert "rank 3 (node 1 on b, process 103) failed first" in outcome.line, why
    assert "runs/x/stacks" in outcome.line
    mute = of_hang(statuses, ["node 2 on c"], 15.0, Path("runs/x"))
    assert mute.line == "fastdiff: node 2 on c failed first: it does not answer"


def announced_hangs(folder: Path, reading: str, told: list[Any]) -> list[int]:
    """Return how many messages a supervisor has sent after each reading of its ranks."""
    rank: Any = SimpleNamespace(number=0, process=SimpleNamespace(pid=100))
    ranks: Any = SimpleNamespace(silent_for_s=lambda: 0.0, starting_for_s=lambda: 0.0, every=[rank])
    nodes: Any = SimpleNamespace(hang=None, announce_hang=lambda: told.append("hang"), propose=told.append)
    signals: Any = None
    limits = Limits(hang_s=HANG_S, start_s=HANG_S, contact_s=HANG_S)
    watch = Watch(ranks, nodes, signals, limits, folder=folder, name="node", master="node", request_dumps=lambda: None)
    announced = []
    for silent_s in (0, HANG_S + 1, HANG_S, HANG_S + 1, HANG_S + 2):
        setattr(ranks, reading, lambda silent_s=silent_s: silent_s)
        watch._check_hang()
        announced.append(len(told))
    return announced


@pytest.mark.parametrize("reading", ["silent_for_s", "starting_for_s"])
def test_a_rank_hangs_after_two_overdue_readings_in_a_row(tmp_path: Path, reading: str) -> None:
    """One alone may have met a beat that was being written."""
    assert announced_hangs(tmp_path, reading, []) == [0, 0, 0, 0, 1]


def test_a_hang_behind_a_lack_of_memory_starts_the_ranks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rank that ran out of memory hangs before it ends, or reports the hang itself."""
    monkeypatch.setenv(NODE_FOLDER, str(tmp_path))
    heartbeat.note_failure(75, "out of memory", micro=4)
    heartbeat.note_failure(1, "no progress")
    told: list[Any] = []
    assert announced_hangs(tmp_path, "silent_for_s", told) == [0, 0, 0, 0, 1]
    assert (told[0].exit_code, told[0].micro) == (75, 4)
