"""Scripts in processes of the fork server, which has imported everything: exit code and output in two seconds."""

import contextlib
import os
import runpy
import signal
import sys
import time
from contextlib import ExitStack
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, Self

import psutil

from tests.support.forked import WITHOUT_GPU, fork_server
from tests.support.processes import BIN, ROOT, Finished, deepspeed_command
from tests.support.servers.ports import reserved_port
from tests.support.waiting import wait_for_the_end

TRAIN = ROOT / "fastdiff" / "train.py"
COMMAND = BIN / "fastdiff"
"""The script of the ``fastdiff`` command."""
_INJECTED = ROOT / "tests" / "support" / "injected"
DYING = _INJECTED / "dying.py"
"""Runs another script and kills it before its durable call of a given number."""
_FORKING = _INJECTED / "forking.py"


def run_script(path: Path, *arguments: str | Path, timeout_s: float = 240, **environment: str) -> Finished:
    """Run a file as Python would, with PYTHONPATH of ``environment``; kill it and fail after ``timeout_s``."""
    with Script(path, *arguments, **environment) as script:
        return script.wait(timeout_s)


def run_with_forks(*words: str | Path, timeout_s: float = 240, **options: Any) -> Finished:
    """Run a command to its end as ``Launcher`` does."""
    with Launcher(*words, **options) as launcher:
        return launcher.wait(timeout_s)


def run_job(path: Path, *arguments: str | Path, ranks: int, timeout_s: float = 240, **environment: str) -> Finished:
    """Run a file on each of ``ranks`` ranks as a launcher does.

    The first rank that fails ends the others with SIGTERM; its exit code is that of the job. They share an output.
    None begins before all have started: they come from one launcher, and a message is later than the start of each.
    """
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved_port())}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    begin = fork_server().Event()
    with NamedTemporaryFile("r") as output, ExitStack() as stack:
        given: Any = {"output": output.name, "begin": begin, **environment}
        job = [stack.enter_context(Script(path, *arguments, **given, **rank)) for rank in own]
        begin.set()
        return Finished(_end_of([script.process for script in job], timeout_s), output.read())


class Script:
    """A script that runs; leaving the context kills it. Start it in the main thread.

    Args:
        path: of the file.
        arguments: its command line.
        cwd: its working folder.
        output: file of its output, which others may share; None: a file of its own.
        begin: event that it waits for; None: it begins at once.
        environment: more variables.
    """

    def __init__(
        self,
        path: Path,
        *arguments: str | Path,
        cwd: Path = ROOT,
        output: str | None = None,
        begin: Event | None = None,
        **environment: str,
    ) -> None:
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
        given = {name: value for name, value in os.environ.items() if name not in ranks}
        given |= {"OMP_NUM_THREADS": "1", **WITHOUT_GPU, **environment}
        self._own = NamedTemporaryFile("r")  # noqa: SIM115
        words = [str(path), *(str(argument) for argument in arguments)]
        self.process = fork_server().Process(target=_run, args=(output or self._own.name, words, cwd, given, begin))
        self.process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self._own.close()

    def wait(self, timeout_s: float = 240) -> Finished:
        """Wait for its end; fail after ``timeout_s``."""
        self.process.join(timeout_s)
        output = self._own.read()
        assert self.process.exitcode is not None, f"still running after {timeout_s} s:\n{output}"
        return Finished(self.process.exitcode, output)


class Launcher(Script):
    """A command whose processes of Python, such as its ranks, are forks; leaving the context kills its session.

    Args:
        words: a script of Python and its command line, or ``-m`` and a module.
        notes: folder for a note of each fork; None: a folder of its own.
        options: of ``Script``.
    """

    def __init__(self, *words: str | Path, notes: Path | None = None, **options: Any) -> None:
        self._notes = TemporaryDirectory()
        super().__init__(_FORKING, notes or self._notes.name, *words, **options)

    def __exit__(self, *error: object) -> None:
        everyone: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.pid)
            everyone = [top, *top.children(recursive=True)]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        super().__exit__(*error)
        wait_for_the_end(everyone)  # until then a rank may hold the lock of its run
        self._notes.cleanup()

    @property
    def pid(self) -> int:
        """Number of the process, and of its group."""
        assert self.process.pid is not None
        return self.process.pid

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self.process.exitcode

    def communicate(self) -> tuple[str, None]:
        """Wait for the end and return the output."""
        return self.wait().output, None


def deepspeed_with_forks(*flags: str | Path, ranks: int, **environment: str) -> Finished:
    """Run ``deepspeed fastdiff/train.py`` with ``flags`` on a free port, its processes forked."""
    return run_with_forks(*deepspeed_command(*flags, ranks=ranks), **environment)


def _end_of(ranks: list[ForkServerProcess], timeout_s: float) -> int:
    """Return the exit code of the first that fails, 0 if none does; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    failed = 0
    while any(rank.is_alive() for rank in ranks):
        assert time.monotonic() < deadline, f"ranks still run after {timeout_s} s"
        if not failed and (failed := _failure(ranks)):
            for rank in ranks:
                if rank.is_alive():
                    rank.terminate()
        time.sleep(0.01)
    return failed or _failure(ranks)


def _failure(ranks: list[ForkServerProcess]) -> int:
    return next((rank.exitcode for rank in ranks if rank.exitcode), 0)


def _run(output: str, words: list[str], cwd: Path, environment: dict[str, str], begin: Event | None) -> None:
    if begin is not None:
        begin.wait()
    with open(output, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    sys.argv = words
    found = [str(Path(words[0]).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]  # as Python does
    sys.path[:0] = [folder for folder in found if folder and folder not in sys.path]
    runpy.run_path(words[0], run_name="__main__")
