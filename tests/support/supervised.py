"""Real supervisors with real ranks of the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from tests.support.forked import WITHOUT_GPU
from tests.support.processes import DIE_WITH_TESTS, ON_CPU, ROOT
from tests.support.waiting import LIMIT_S, steps_logged, wait_until


class Supervised:
    """A supervisor of one node, started as ``fastdiff launch`` starts it; its output goes to a file.

    Args:
        run: the run folder; every process of the run has it on its command line.
        flags: of the trainer.
        options: of the supervisor.
        environment: more variables.
        output: a descriptor for the output instead.
    """

    def __init__(
        self,
        run: Path,
        flags: Sequence[str],
        *options: str,
        node: int = 0,
        environment: dict[str, str] | None = None,
        output: int | None = None,
    ) -> None:
        self.run = run
        self._log = run.with_name(f"supervisor-{len(list(run.parent.glob('supervisor-*.log')))}.log")
        command = [sys.executable, "-m", "fastdiff.cluster.supervisor.main", "--node-rank", str(node), *options]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCH_EXTENSIONS_DIR", "MASTER_ADDR", "MASTER_PORT")
        env = {name: value for name, value in os.environ.items() if name not in names}
        env |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(run.parent), **WITHOUT_GPU}
        env |= environment or {}
        with self._log.open("wb") as log:
            target = log if output is None else output
            self.process = subprocess.Popen(
                [*DIE_WITH_TESTS, *command, "--", *flags, *ON_CPU],
                cwd=ROOT,
                env=env,
                stdout=target,
                stderr=target,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """The output of the supervisor and its ranks."""
        return self._log.read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """The last line of the output."""
        return self.output.rstrip("\n").splitlines()[-1]

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        for process in psutil.Process(self.process.pid).children():
            if process.environ().get("RANK") == str(number):
                return process
        raise AssertionError(f"no rank {number}; the output:\n{self.output}")

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Return its exit code; fail after ``timeout_s``."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout_s} s; the output:\n{self.output}") from None

    def wait_for_steps(self, steps: int) -> None:
        """Return when the run has logged so many steps; fail if the supervisor ends before."""

        def logged() -> bool:
            assert self.process.poll() is None, self.output
            return steps_logged(self.run) >= steps

        wait_until(logged, f"step {steps} of {self.run}")


def processes_of(run: Path) -> list[psutil.Process]:
    """Return the processes that have this run folder on their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and str(run) in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def end(supervisors: Iterable[Supervised]) -> None:
    """Kill supervisors and their ranks."""
    for supervised in supervisors:
        for process in [supervised.process.pid, *(p.pid for p in processes_of(supervised.run))]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        supervised.process.wait()
