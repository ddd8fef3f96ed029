"""Real ranks and real commands for tests, each with a free port and a hard time limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff.parallel.world import free_port

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def run_ranks(function: Callable[..., Any], *args: Any, ranks: int, timeout_s: float = 240) -> list[Any]:
    """Call ``function(world, *args)`` on ``ranks`` gloo ranks and return their values in rank order."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(results, rank, ranks, port, function, args)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(values) < ranks:
            try:
                rank, value, trace = results.get(timeout=1)
            except queue.Empty:
                assert time.monotonic() < deadline, f"no result within {timeout_s} s; have ranks {sorted(values)}"
                dead = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
                assert not dead, f"a rank died with exit code {dead[0]}"
                continue
            assert trace is None, f"rank {rank} failed:\n{trace}"
            values[rank] = value
    finally:
        for process in processes:
            process.join(timeout=10 if len(values) == ranks else 0)
            process.kill()
    return [values[rank] for rank in range(ranks)]


def _rank(results: Any, rank: int, ranks: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    try:
        import torch

        from fastdiff.parallel.world import start_world, stop_world

        torch.set_num_threads(1)
        results.put((rank, function(start_world(), *args), None))
        stop_world()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    output: str


def start(command: Sequence[str | Path], cwd: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own, so that ``stop`` reaches all of its processes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
    env["PATH"] = f"{BIN}:{env['PATH']}"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


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
    """Return the command line that starts ``ranks`` ranks of the trainer on a free port."""
    launcher = [BIN / "deepspeed", "--num_accelerators", str(ranks), "--master_port", str(free_port())]
    return [*launcher, "fastdiff/train.py", *flags]


def fastdiff(*arguments: str | Path, **options: Any) -> Finished:
    """Run the ``fastdiff`` command."""
    return run([BIN / "fastdiff", *arguments], **options)


def build_operators(world: Any) -> None:
    """Let DeepSpeed compile what it compiles at a start."""
    import deepspeed

    from fastdiff.training.engine import _unname_shared_memory

    deepspeed.init_distributed()
    _unname_shared_memory()
