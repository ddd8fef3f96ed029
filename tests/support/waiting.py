"""Waiting for what other processes do: for an event, with a limit that only a hang reaches."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import psutil

LIMIT_S = 240.0
"""Far more than anything takes on a busy machine."""


class Running(Protocol):
    """A process, such as that of ``subprocess.Popen``."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""

    def communicate(self) -> tuple[Any, Any]:
        """Wait for the end and return the output."""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = LIMIT_S) -> None:
    """Return when ``condition`` holds; fail after ``timeout_s``.

    Args:
        condition: asked again and again; it may itself fail, for example if a process has ended.
        what: the event, in words.
        timeout_s: the limit.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.005)


def wait_for_the_end(processes: Iterable[psutil.Process]) -> None:
    """Return when all have ended; a zombie has, whether or not the process that adopted it ever reaps it."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    left = list(processes)
    wait_until(lambda: not any(runs(process) for process in left), f"the end of {[process.pid for process in left]}")


def steps_logged(run: Path) -> int:
    """Return how many steps a run has logged."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_steps(run: Path, steps: int, *processes: Running) -> None:
    """Return when a run has logged so many steps; fail as soon as one of its ``processes`` has ended."""

    def logged() -> bool:
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        return steps_logged(run) >= steps

    wait_until(logged, f"step {steps} of {run}")
