"""Real ranks and real commands for tests, each with a port of its own and a hard time limit."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked import WITHOUT_GPU, Ranks, values
from tests.support.servers.ports import reserved_port

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ON_CPU = ("--performance.device", "cpu")
DIE_WITH_TESTS = ("setpriv", "--pdeathsig", "KILL")
"""The start of a command that the kernel kills when the tests end, by whatever signal.

The ranks of a launcher or a supervisor notice its end, save and end, too.
"""


def run_ranks(function: Callable[..., Any], *args: Any, ranks: int, timeout_s: float = 240) -> list[Any]:
    """Call ``function(world, *args)`` on ``ranks`` gloo ranks and return their values in rank order."""
    running = Ranks(function, *args, ranks=ranks, group_timeout_s=timeout_s)
    return values(running.wait(timeout_s))


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    output: str


def start(command: Sequence[str | Path], cwd: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own, so that ``stop`` reaches all of its processes; it sees no GPU.

    Call it in the main thread: the kernel takes the thread that starts a process for its parent.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **WITHOUT_GPU, **environment}
    env["PATH"] = f"{BIN}:{env['PATH']}"
    return subprocess.Popen(
        [*DIE_WITH_TESTS, *(str(part) for part in command)],
        cwd=cwd,
        env=env,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@contextlib.contextmanager
def started(command: Sequence[str | Path]) -> Iterator[subprocess.Popen[str]]:
    """Start a command; leaving the context kills it and everything that it started."""
    process = start(command)
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """Kill a command and everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(command: Sequence[str | Path], cwd: Path = ROOT, timeout_s: float = 240, **environment: str) -> Finished:
    """Run a command to its end; kill it and fail after ``timeout_s``."""
    process = start(command, cwd, **environment)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        stop(process)
    return Finished(process.returncode, output)


def deepspeed(*flags: str | Path, ranks: int = 1, **options: Any) -> Finished:
    """Run ``deepspeed fastdiff/train.py`` with ``flags`` on a free port."""
    return run(deepspeed_command(*flags, ranks=ranks), **options)


def deepspeed_command(*flags: str | Path, ranks: int = 1) -> list[str | Path]:
    """Return the command line that starts ``ranks`` ranks of the trainer on a free port, and on the CPU.

    Where no GPU is visible DeepSpeed's launcher shows its ranks those of the machine.
    """
    launcher = [BIN / "deepspeed", "--num_accelerators", str(ranks), "--master_port", str(reserved_port())]
    return [*launcher, "fastdiff/train.py", *flags, *ON_CPU]


def fastdiff(*arguments: str | Path, **options: Any) -> Finished:
    """Run the ``fastdiff`` command."""
    return run([BIN / "fastdiff", *arguments], **options)
