"""A training in another process: its progress as a line, the SIGKILL of a rank, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fastdiff.checkpoint.manifest import committed
from fastdiff.errors import DivergedError, FastdiffError
from fastdiff.json_lines import read_records
from fastdiff.progress_bar import Bar

FASTDIFF = (sys.executable, "-c", "from fastdiff.cli.main import entry; entry()")
"""The command of this installation, also where no ``fastdiff`` is on the path."""
_POLL_S = 0.2
_PARTING_S = 60.0
_LAST_LINES = 12


class Training:
    """``fastdiff train`` with the output in a file."""

    def __init__(self, folder: Path, flags: Sequence[str], steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.log = folder.with_name(f"{folder.name}.log")
        self._command = [*FASTDIFF, "train", *flags, "--output.folder", str(folder), "--steps", str(steps)]

    def run(self, on_step: Callable[[Training, int], bool] | None = None) -> int:
        """Run to the end with a bar; return the exit code. ``on_step`` gets the newest logged step until it is True."""
        with self._process() as process, Bar("training", self.steps, "steps", keeps=True) as bar:
            self.supervisor = process.pid
            while (code := process.poll()) is None:
                self._show(bar)
                if on_step is not None and on_step(self, int(bar.done)):
                    on_step = None
                time.sleep(_POLL_S)
            self._show(bar)
        return code

    def checkpoints(self) -> list[int]:
        """Return the steps of the committed checkpoints, newest first."""
        return [int(path.name.removeprefix("step-")) for path in committed(self.folder / "checkpoints")]

    def last_words(self) -> str:
        """Return the last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])

    def require_done(self, code: int) -> None:
        """Raise the end of a training that failed, a FastdiffError with its last lines."""
        if code:
            kind = DivergedError if code == DivergedError.exit_code else FastdiffError
            raise kind(f"the training ended with exit code {code}; the end of {self.log}:\n{self.last_words()}")

    def _show(self, bar: Bar) -> None:
        step = bar.done
        if records := read_records(self.folder / "metrics.jsonl"):
            step = records[-1]["step"]
            bar.figures = [f"loss {records[-1]['loss']:.3f}"]
        bar.update(step - bar.done)

    @contextmanager
    def _process(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start it in the group of this process, so that Ctrl-C reaches it: it saves, and this waits for that."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            process = subprocess.Popen(self._command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_PARTING_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def run_killed(training: Training) -> str:
    """Run until a rank gets a SIGKILL, at half of the steps and after a checkpoint; return what happened, in words.

    Raises:
        FastdiffError: the training ended before.
    """
    killed: list[int] = []

    def kill(training: Training, step: int) -> bool:
        if step * 2 < training.steps or not training.checkpoints():
            return False
        killed.extend([step, *kill_rank(training.supervisor)])
        return True

    code = training.run(kill)
    if not killed:
        training.require_done(code or FastdiffError.exit_code)
    return (
        f"At step {killed[0]} rank {killed[1]} got a SIGKILL (process {killed[2]}). The supervisor says:\n"
        f"  {_last_error(training.last_words())}\n"
        f"What is left: the checkpoint of step {training.checkpoints()[0]}, written whole or not at all."
    )


def _last_error(text: str) -> str:
    errors = [line for line in text.splitlines() if "error" in line]
    return errors[-1] if errors else text.strip().rpartition("\n")[2]


def kill_rank(supervisor: int) -> tuple[int, int]:
    """Send SIGKILL to the highest rank below a supervisor; return its number and process id. FastdiffError: no rank."""
    ranks = {_environment(pid).get("RANK"): pid for pid in _below(supervisor)}
    numbered = {int(rank): pid for rank, pid in ranks.items() if rank is not None}
    if not numbered:
        raise FastdiffError(f"process {supervisor} has no rank that could be killed")
    rank = max(numbered)
    os.kill(numbered[rank], signal.SIGKILL)
    return rank, numbered[rank]


def _below(process: int) -> list[int]:
    """Return all descendants of a process, nearest first."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has just ended
    found = [process]
    for pid in found:
        found += sorted(child for child, parent in parents.items() if parent == pid)
    return found[1:]


def _environment(process: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{process}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
