"""Time and processor time from the start of a command to its first optimizer step, over all of its processes."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fastdiff_bench import BenchError

_LOOK_S = 0.01
_LAST_LINES = 30


@dataclass(frozen=True, slots=True)
class Start:
    """The start of one program."""

    seconds: float
    cpu_seconds: float
    """User and system time of all processes, also of those that have ended."""
    processes: int
    """Processes at the first step."""
    rehearsal: tuple[float, float] | None = None
    """Seconds and processor seconds of the rehearsal in it; None: the program has none."""


def start(
    command: Sequence[str], stepped: Callable[[], bool], log: Path, environment: Mapping[str, str], limit_s: float
) -> Start:
    """Run ``command`` until ``stepped`` and end it; BenchError if it ended, or took longer."""
    with log.open("wb") as output:
        began = time.perf_counter()
        process = psutil.Popen(
            list(command), env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            while not stepped():
                if process.poll() is not None:
                    raise _failed(command, f"ended with code {process.returncode} before a step", log)
                if time.perf_counter() - began > limit_s:
                    raise _failed(command, f"took no step within {limit_s:.0f} s", log)
                time.sleep(_LOOK_S)
            seconds = time.perf_counter() - began
            tree = [process, *process.children(recursive=True)]
            return Start(seconds, sum(map(_cpu_seconds, tree)), len(tree))
        finally:
            _end(process)


def _failed(command: Sequence[str], what: str, log: Path) -> BenchError:
    last = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
    return BenchError(f"{' '.join(command[:4])} ... {what}:\n{last}")


def _cpu_seconds(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def _end(process: psutil.Popen) -> None:
    """Kill the program, and all that it started."""
    tree = [process]
    with suppress(psutil.NoSuchProcess):
        tree += process.children(recursive=True)
    for one in tree:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            one.kill()
    psutil.wait_procs(tree, timeout=30)


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a program on the CPU, without a launcher's variables."""
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launchers}
    kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
