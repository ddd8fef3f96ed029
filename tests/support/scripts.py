"""Scripts in processes of the fork server, which has imported everything: exit code and output in two seconds."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import NamedTemporaryFile

from tests.support.forked import WITHOUT_GPU, end_with_the_tests, fork_server
from tests.support.ports import reserved_port
from tests.support.processes import BIN, ROOT, Finished

TRAIN = ROOT / "fastdiff" / "train.py"
COMMAND = BIN / "fastdiff"
"""The script of the ``fastdiff`` command."""


def run_script(path: Path, *arguments: str | Path, timeout_s: float = 240, **environment: str) -> Finished:
    """Run a file as Python would, with PYTHONPATH of ``environment``; kill it and fail after ``timeout_s``."""
    return run_job(path, *arguments, ranks=0, timeout_s=timeout_s, **environment)


def run_job(path: Path, *arguments: str | Path, ranks: int, timeout_s: float = 240, **environment: str) -> Finished:
    """Run a file on each of ``ranks`` ranks as a launcher does; 0: once, in no job.

    The first rank that fails ends the others with SIGTERM; its exit code is that of the job. They share an output.
    """
    given = {**os.environ, "OMP_NUM_THREADS": "1", **WITHOUT_GPU, **environment}
    job = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved_port())}
    own = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
    with NamedTemporaryFile("r") as output:
        words = [str(path), *(str(argument) for argument in arguments)]
        processes = [fork_server().Process(target=_run, args=(output.name, words, given, rank)) for rank in own]
        for process in processes:
            process.start()
        try:
            code = _end_of(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        assert code is not None, f"still running after {timeout_s} s:\n{output.read()}"
        return Finished(code, output.read())


def _end_of(processes: list[ForkServerProcess], timeout_s: float) -> int | None:
    """Return the exit code of the first that fails, 0 if none does; None after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    failed = 0
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline:
            return None
        if not failed and (failed := _failure(processes)):
            for process in processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.01)
    return failed or _failure(processes)


def _failure(processes: list[ForkServerProcess]) -> int:
    return next((process.exitcode for process in processes if process.exitcode), 0)


def _run(output: str, words: list[str], environment: dict[str, str], job: dict[str, str]) -> None:
    end_with_the_tests()
    with open(output, "a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(job)
    import torch

    torch.set_num_threads(1)
    sys.argv = words
    found = [str(Path(words[0]).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]  # as Python does
    sys.path[:0] = [folder for folder in found if folder and folder not in sys.path]
    runpy.run_path(words[0], run_name="__main__")
