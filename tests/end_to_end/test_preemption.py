"""Preemption: all ranks save one step, exit with 75 and leave no process; then the run resumes."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastdiff.config.run import RunConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.parallel import preemption
from fastdiff.parallel.preemption import StopRequest, listening
from fastdiff.parallel.world import World
from fastdiff.sampling.solvers import sample
from fastdiff.train import main
from fastdiff.training.callbacks import previews
from tests.support.forked import forked_ranks, values
from tests.support.processes import Finished, deepspeed_command, run, started
from tests.support.runs import flags, hexes, intact, losses, tiny
from tests.support.scripts import Launcher
from tests.support.waiting import wait_for_steps, wait_for_the_end

STEPS = 16
ZERO3 = ["--deepspeed_config", "deepspeed_configs/zero3.json"]


def config_of(data: Path, folder: Path, steps: int = STEPS) -> RunConfig:
    return tiny(data, folder, steps=steps, batch__micro=8, data__loader="auto")


def _main(world: World, argv: list[str]) -> int:
    preemption.NOTICE_S = 600.0  # on a loaded machine, too, every step ends before
    return main(argv)


def _main_signalled(world: World, argv: list[str], rank: int, number: signal.Signals, step: int) -> int:
    """Run the command; one rank gets a signal in the step after this one, which ends once a thread has taken it."""
    add_noise, begun = Objective.add_noise, itertools.count()
    make, made = StopRequest.make, threading.Event()

    def noted(request: StopRequest, reason: str) -> None:
        make(request, reason)
        made.set()

    def corrupt_signalled(*arguments: Any, **options: Any) -> Any:
        if next(begun) == step:
            os.kill(os.getpid(), number)
            made.wait()
        return add_noise(*arguments, **options)

    if world.rank == rank:
        Objective.add_noise = corrupt_signalled  # type: ignore[method-assign]
        StopRequest.make = noted  # type: ignore[method-assign]
    return _main(world, argv)


def _main_signalled_as_it_draws(world: World, argv: list[str], rank: int, number: signal.Signals) -> int:
    """Run the command; one rank gets a signal when it begins to draw, and draws until it sees the signal."""
    rehearsed = False

    def draw(*arguments: Any, **options: Any) -> Any:
        nonlocal rehearsed
        if not rehearsed:
            rehearsed = True
            return sample(*arguments, **options)
        os.kill(os.getpid(), number)
        while True:
            sample(*arguments, **options)

    if world.rank == rank:
        previews.sample = draw
    return _main(world, argv)


@pytest.fixture(scope="module")
def whole(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("preemption") / "whole"
    assert values(forked_ranks(_main, [*flags(config_of(digits, folder)), *ZERO3])) == [0, 0]
    return losses(folder)


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    ("rank", "number"), [pytest.param(0, signal.SIGTERM, marks=pytest.mark.nightly), (1, signal.SIGUSR1)]
)
def test_a_signal_to_one_rank_stops_all_at_one_step(
    whole: list[float], digits: Path, tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    argv = [*flags(config_of(digits, tmp_path / "run")), *ZERO3]
    assert values(forked_ranks(_main_signalled, argv, rank, number, 5)) == [75, 75]
    (step,) = intact(tmp_path / "run")
    assert 5 <= step < STEPS
    assert hexes(losses(tmp_path / "run")) == hexes(whole[:step])
    assert values(forked_ranks(_main, argv)) == [0, 0]
    assert hexes(losses(tmp_path / "run")) == hexes(whole)


@dataclass(frozen=True)
class Tree:
    """The processes of a `deepspeed` command."""

    command: subprocess.Popen[str] | Launcher
    everyone: list[psutil.Process]

    @property
    def launcher(self) -> psutil.Process:
        return next(p for p in self.everyone if "deepspeed.launcher.launch" in p.cmdline())


@pytest.fixture
def running(
    whole: list[float], digits: Path, tmp_path: Path, nightly: bool, request: pytest.FixtureRequest
) -> Iterator[Tree]:
    """Its parameter says whether the processes start Python anew or are forked; by night all start it anew."""
    command = deepspeed_command(*flags(config_of(digits, tmp_path / "run", 100_000)), *ZERO3, ranks=2)
    with started(command) if nightly or request.param == "anew" else Launcher(*command) as process:
        wait_for_steps(tmp_path / "run", 3, process)
        yield Tree(process, [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)])


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    ("target", "running"),
    [
        pytest.param("command", "anew", marks=pytest.mark.nightly),
        pytest.param("launcher", "anew", marks=pytest.mark.nightly),
        pytest.param("launcher killed", "forked", marks=pytest.mark.nightly),
        pytest.param("Ctrl-C", "forked", marks=pytest.mark.nightly),
    ],
    indirect=["running"],
)
def test_a_launcher_that_ends_leaves_nobody_and_loses_nothing(
    whole: list[float], digits: Path, tmp_path: Path, running: Tree, target: str
) -> None:
    """DeepSpeed's command passes no SIGTERM on to its launcher, and a launcher that is killed none to the ranks.

    Ctrl-C reaches all processes; DeepSpeed's launcher then also sends SIGTERM, and its command ends with a traceback.
    """
    process = running.command if target == "command" else running.launcher
    if target == "Ctrl-C":
        os.killpg(running.command.pid, signal.SIGINT)
    else:
        os.kill(process.pid, signal.SIGKILL if target == "launcher killed" else signal.SIGTERM)
    wait_for_the_end(running.everyone)
    if target == "Ctrl-C":
        output = running.command.communicate()[0]
        assert len(re.findall(r"fastdiff: (Ctrl-C|SIGTERM): saved step \d+; the same command resumes", output)) == 1
        assert "fastdiff: error" not in output
        assert "[rank0]" not in output, "no traceback of a rank"
    steps = losses(tmp_path / "run")
    assert intact(tmp_path / "run") == [len(steps)], "the last step that was logged is the one that is saved"
    assert hexes(steps[:STEPS]) == hexes(whole[: len(steps)])


@pytest.mark.fault(12)
def test_a_signal_during_the_images_saves_the_step_before_them(
    whole: list[float], digits: Path, tmp_path: Path
) -> None:
    """The ranks agree to break off, as they agree on an error."""
    changes = {"output__sample_every": 3, "output__sample_steps": 2}
    argv = [*flags(tiny(digits, tmp_path / "run", STEPS, batch__micro=8, **changes)), *ZERO3]
    assert values(forked_ranks(_main_signalled_as_it_draws, argv, 1, signal.SIGTERM)) == [75, 75]
    assert intact(tmp_path / "run") == [3]
    assert hexes(losses(tmp_path / "run")) == hexes(whole[:3])


def python(code: str, shell: str = '"$PYTHON" -c "$CODE"', **environment: str) -> Finished:
    """Run code behind the imports that it needs, started by these words of a shell."""
    module = "fastdiff.parallel.preemption"
    imports = f"import os, signal, time\nfrom {module} import *\nfrom fastdiff.parallel import preemption\n"
    return run(["sh", "-c", shell], PYTHON=sys.executable, CODE=imports + code, **environment)


def test_a_signal_before_the_first_step_ends_at_once() -> None:
    done = python("with listening():\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(600)")
    assert done.code == 75
    assert "SIGTERM before the first step" in done.output


def test_signals_after_the_end_do_not_change_the_exit_code() -> None:
    code = """
class Heart:
    at_s = time.monotonic() + 60
with listening() as request:
    request.arm(Heart())
    os.kill(os.getpid(), signal.SIGTERM)
    while request.reason is None:
        time.sleep(0.01)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR1)
raise SystemExit(75)
"""
    assert python(code).code == 75


def test_a_rank_whose_step_never_ends_gives_up() -> None:
    """As one that waits, with NCCL, for another that is gone."""
    code = """
preemption.NOTICE_S = 0.5
class Heart:
    at_s = time.monotonic()
with listening() as request:
    request.arm(Heart())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
"""
    done = python(code)
    assert done.code == 75
    assert "in a step that does not end" in done.output


def test_a_second_ctrl_c_ends_a_rank_at_once() -> None:
    code = """
class Heart:
    at_s = time.monotonic() + 3600
with listening() as request:
    request.arm(Heart())
    os.kill(os.getpid(), signal.SIGINT)
    while request.reason is None:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
"""
    done = python(code)
    assert done.code == 130
    assert done.output.splitlines() == [preemption.STOPPING_LINE, preemption.INTERRUPTED_LINE]


def test_without_a_launcher_the_shell_may_end(tmp_path: Path) -> None:
    """`nohup python fastdiff/train.py ... &`, and a logout."""
    code = """
preemption._POLL_S = 0.05
shell = os.getppid()
with listening() as request:
    open(os.environ["LISTENS"], "w").close()
    while os.getppid() == shell:
        time.sleep(0.01)
    time.sleep(4 * preemption._POLL_S)
    print(request.reason)
"""
    shell = '"$PYTHON" -c "$CODE" & while [ ! -e "$LISTENS" ]; do sleep 0.01; done'
    assert python(code, shell, LISTENS=str(tmp_path / "listens")).output == "None\n"


def test_a_launcher_that_ended_before_anybody_looked_is_noticed() -> None:
    code = """
while os.getppid() == int(os.environ["LAUNCHER"]):
    time.sleep(0.01)
with listening():
    time.sleep(600)
"""
    orphan = python(code, 'LAUNCHER=$$ "$PYTHON" -c "$CODE" &', RANK="0", WORLD_SIZE="1")
    assert "the launcher ended before the first step" in orphan.output


def test_handlers_are_those_of_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with listening() as request:
        assert request.reason is None
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
