"""Interleaved measurement: programs step alternately (A, B, A, B, ...), so that noise affects all alike.

Each program (a trainer or a reader) has its own process, and so its own peak memory, global settings and compiled code.
All are built one after the other before the first session, and wait while another one steps.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch

from fastdiff.models.cost.memory import exhausted
from fastdiff.parallel.world import free_port
from fastdiff_bench import BenchError
from fastdiff_bench.measure.session import Enough, Fact, Memory, Steps, StepTimer
from fastdiff_bench.measure.timing import Timing
from fastdiff_bench.records.tables import progress

_LAST_LINES = 30
_PARTING_SECONDS = 5.0
"""Grace period in seconds for a stopped program to end by itself."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to measure."""

    name: str
    run: Callable[..., None]
    """``run(timer, *arguments)``, a module-level function: builds, calls ``timer.ready()``, steps until ``Enough``."""
    arguments: tuple[Any, ...] = ()
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of its processes."""


@dataclass(slots=True)
class Result:
    """Result of a program."""

    sessions: list[Steps] = field(default_factory=list)
    """Steps of each round, without the warm-up."""
    facts: dict[str, Fact] = field(default_factory=dict)
    memory: Memory | None = None
    failure: str | None = None
    """Reason for an early end, in one line; None: it ran to the end."""
    out_of_memory: bool = False

    @property
    def seconds(self) -> list[float]:
        """Seconds of every step."""
        return [second for session in self.sessions for second in session.seconds]

    @property
    def timing(self) -> Timing:
        """Timing of a step."""
        return Timing.of(self.seconds)

    @property
    def processor_time(self) -> Timing:
        """Processor time of a step, all threads and child processes, over the sessions."""
        return Timing.of([session.cpu_seconds / len(session.seconds) for session in self.sessions])

    def phase(self, name: str) -> Timing:
        """Return the timing of one phase of a step."""
        return Timing.of([second for session in self.sessions for second in session.phases[name]])

    @property
    def allocation_retries(self) -> int:
        """Number of times that torch's allocator had to return memory to the GPU before an allocation."""
        return sum(session.allocation_retries for session in self.sessions)


@dataclass(frozen=True, slots=True)
class Effort:
    """Number of steps of each program."""

    rounds: int
    """Sessions of each program, at least two."""
    steps: int
    """Measured steps per session."""
    warm_up: int
    """Unmeasured steps of each program before the first round."""
    settling: int = 0
    """Unmeasured steps at the start of every session: a prefetching loader had the other sessions to read ahead, and
    torch's allocator gets its memory back from the GPU.
    """
    limit_seconds: float = 600.0
    """Limit for building and for every session; a slower program is stopped."""


def run_interleaved(
    programs: Sequence[Program],
    effort: Effort,
    *,
    device: str,
    before_session: Callable[[], None] | None = None,
    after_round: Callable[[dict[str, Result]], None] | None = None,
) -> dict[str, Result]:
    """Run the programs interleaved; one that fails is left out from then on.

    Args:
        programs: programs with different names.
        effort: number of steps.
        device: ``cuda`` or ``cpu``.
        before_session: called here before every session except the warm-up, while all programs wait.
        after_round: called here with the results so far, of which those of programs that failed are incomplete.
    """
    results = {program.name: Result() for program in programs}
    workers: dict[str, _Worker] = {}
    folder = Path(tempfile.mkdtemp(prefix="fastdiff-bench-interleaved-"))
    try:
        for number, program in enumerate(programs):
            progress(f"{program.name}: building and warming up")
            worker = _Worker(program, effort.limit_seconds, device, folder / str(number))
            workers[program.name] = worker
            _attempt(worker, results[program.name], lambda w: w.ready(effort.warm_up))
        for number in range(effort.rounds):
            for name, worker in workers.items():
                if results[name].failure is None:
                    progress(f"round {number + 1} of {effort.rounds}: {name}")
                    if before_session is not None:
                        before_session()
                    _attempt(worker, results[name], lambda w: w.run_session(effort.steps, effort.settling))
            if after_round is not None:
                after_round(results)
        for name, worker in workers.items():
            if results[name].failure is None:
                _attempt(worker, results[name], lambda w: w.finish())
    finally:
        progress("")
        for worker in workers.values():
            worker.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return results


def ratios(ours: Result, theirs: Result) -> Timing:
    """Return the speed-up of ``ours`` over ``theirs`` per round: above 1, ours is faster."""
    pairs = zip(ours.sessions, theirs.sessions, strict=True)
    return Timing.of([statistics.median(b.seconds) / statistics.median(a.seconds) for a, b in pairs])


def _attempt(worker: _Worker, result: Result, action: Callable[[_Worker], None]) -> None:
    worker.result = result
    try:
        action(worker)
    except BenchError as error:
        result.failure = str(error)
        worker.kill()
        if not result.out_of_memory:
            progress("")
            print(worker.last_words(), file=sys.stderr)


class _Worker:
    """The processes of a program, one per rank, seen from the measuring process."""

    def __init__(self, program: Program, limit_seconds: float, device: str, folder: Path) -> None:
        self.result = Result()
        self._limit, self._log = limit_seconds, folder / "log"
        folder.mkdir()
        context = multiprocessing.get_context("spawn")
        port, ranks = free_port(), program.ranks
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}), **program.environment,
            }  # fmt: skip
            arguments = (theirs, device, folder, program.run, program.arguments)
            # Not a daemon, which could have no child processes. It ends with this process all the same, by _Worker.kill
            # or by the end of the connection.
            process = context.Process(target=_work, args=arguments)
            # Before it starts: torch reads some of them on its first import.
            with patch.dict(os.environ, environment):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def ready(self, warm_up: int) -> None:
        self.result.facts.update(self._answers("ready")[0])
        if warm_up:
            self._go(warm_up)

    def run_session(self, steps: int, settling: int) -> None:
        self.result.sessions.append(self._go(settling + steps).without_first(settling))

    def finish(self) -> None:
        self._tell(0)
        self.result.facts.update(self._answers("finished")[0])

    def kill(self) -> None:
        for connection in self._connections:
            connection.close()  # ends a process that waits for its session
        until = time.monotonic() + _PARTING_SECONDS
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()

    def last_words(self) -> str:
        """Return the last output lines of its processes."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:])

    def _go(self, steps: int) -> Steps:
        self._tell(steps)
        found, facts, self.result.memory = self._answers("steps")[0]
        self.result.facts.update(facts)
        return cast(Steps, found)

    def _tell(self, steps: int) -> None:
        for connection in self._connections:
            with suppress(BrokenPipeError):  # the process has ended; the answer reports it
                connection.send(steps)

    def _answers(self, kind: str) -> list[Any]:
        """Return every rank's answer; raise BenchError as soon as one fails, since the rest may wait for it."""
        answers: dict[Connection, Any] = {}
        until = time.monotonic() + self._limit
        while len(answers) < len(self._connections):
            open_ = [connection for connection in self._connections if connection not in answers]
            heard = wait(open_, max(0.0, until - time.monotonic()))
            if not heard:
                raise BenchError(f"no answer within {self._limit:.0f} s")
            answers |= {connection: self._answer(connection, kind) for connection in open_ if connection in heard}
        return [answers[connection] for connection in self._connections]

    def _answer(self, connection: Connection, kind: str) -> Any:
        try:
            found, content = connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended(self._processes[self._connections.index(connection)]) from None
        if found != kind:
            self.result.out_of_memory = found == "out of memory"
            raise BenchError(str(content))
        return content

    def _ended(self, process: BaseProcess) -> BenchError:
        process.join(self._limit)
        self.result.out_of_memory = process.exitcode == -signal.SIGKILL
        if self.result.out_of_memory:
            return BenchError("the process was killed, probably by the system's out-of-memory killer")
        return BenchError(f"the process ended without a message, with exit code {process.exitcode}")


def in_another_process(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """Return the result of a module-level function in a new process, whose memory and settings end with it.

    Args:
        function: of values that can be pickled, as its result.
        arguments: of the function.
        environment: additional variables of the process.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with patch.dict(os.environ, environment or {}):
            running = pool.submit(function, *arguments)
        return running.result()


def _work(
    connection: Connection, device: str, folder: Path, run: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Run the process of one rank, with its output in ``log`` in ``folder``."""
    with (folder / "log").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        timer = StepTimer(connection, torch.device(device), folder)
        try:
            run(timer, *arguments)
        except Enough:
            connection.send(("finished", timer.facts))
        else:
            raise RuntimeError("the program ended before it had taken all steps")
    except BaseException as error:
        traceback.print_exc()
        connection.send(("out of memory" if ran_out(error) else "failed", _reason(error)))
    finally:
        # A normal exit would wait for the other ranks, or for the threads of a loader. Named semaphores are released
        # here; otherwise the measuring process would warn about them.
        util._run_finalizers(0)  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def ran_out(error: BaseException) -> bool:
    """Return whether GPU or system memory ran out, also if torch.compile or another library wrapped the error."""
    return exhausted(error) is not None


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
