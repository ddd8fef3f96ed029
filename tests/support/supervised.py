"""Real supervisors with real ranks of the trainer."""

import contextlib
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from fastdiff.exit_message import started_s
from tests.support.processes import ON_CPU
from tests.support.scripts import Launcher
from tests.support.waiting import LIMIT_S, steps_logged, wait_until


class Supervised:
    """A supervisor of one node, as ``fastdiff launch`` starts it; its output goes to a file.

    It and its ranks come from the fork server, which has imported everything.

    Args:
        run: the run folder; every process of the run has it on its command line.
        flags: of the trainer.
        options: of the supervisor.
        environment: more variables.
        output: a FIFO for the output instead.
    """

    def __init__(
        self,
        run: Path,
        flags: Sequence[str],
        *options: str,
        node: int = 0,
        environment: dict[str, str] | None = None,
        output: Path | None = None,
    ) -> None:
        self.run = run
        self._log = run.with_name(f"supervisor-{len(list(run.parent.glob('supervisor-*.log')))}.log")
        self._log.touch()
        _forks(run).mkdir(exist_ok=True)
        command = ["-m", "fastdiff.cluster.supervisor.main", "--node-rank", str(node), *options, "--", *flags, *ON_CPU]
        env = {"TMPDIR": str(run.parent), **(environment or {})}
        place = str(output or self._log)
        self.process = Launcher(*command, notes=_forks(run), output=place, **env)

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
            if _rank_of(self.run, process) == str(number):
                return process
        raise AssertionError(f"no rank {number}; the output:\n{self.output}")

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Return its exit code; fail after ``timeout_s``."""
        self.process.process.join(timeout_s)
        code = self.process.poll()
        assert code is not None, f"still there after {timeout_s} s; the output:\n{self.output}"
        return code

    def wait_for_steps(self, steps: int) -> None:
        """Return when the run has logged so many steps; fail if the supervisor ends before."""

        def logged() -> bool:
            assert self.process.poll() is None, self.output
            return steps_logged(self.run) >= steps

        wait_until(logged, f"step {steps} of {self.run}")


def _forks(run: Path) -> Path:
    return run.with_name("forks")


def _rank_of(run: Path, process: psutil.Process) -> str | None:
    """Return the number of a rank, "" for another fork of the supervisor; None: it is none of its forks."""
    note = _forks(run) / str(process.pid)
    if not note.exists():
        return None
    started, _, rank = note.read_text().partition(" ")
    return rank if float(started) == started_s(process.pid) else None  # another process may have its number


def processes_of(run: Path) -> list[psutil.Process]:
    """Return the forks of the supervisors of a run, and the processes that have its folder on their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            own = _rank_of(run, process) is not None or str(run) in process.cmdline()
            if own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def end(supervisors: Iterable[Supervised]) -> None:
    """Kill supervisors and their ranks."""
    for supervised in supervisors:
        with supervised.process:
            supervised.process.send_signal(signal.SIGKILL)
            for process in processes_of(supervised.run):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
