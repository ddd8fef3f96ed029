"""Contestants step in turns (A, B, A, B, ...), each in a process of its own, so that noise meets all of them alike.

A process of its own gives each its own peak memory, global settings and compiled code. All of them are built, one after
the other, before the first turn, and wait while another steps.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from bench import BenchError
from bench.measure.session import Enough, Fact, Steps, Turn
from bench.measure.timing import Timing
from bench.records.tables import progress
from fastdiff.parallel.extension_locks import stale_locks
from fastdiff.parallel.world import free_port
from fastdiff.training.metrics import peak_resident_bytes

_LAST_LINES = 30
_PARTING_SECONDS = 5.0
"""In which a contestant that is stopped may end by itself."""
_NO_MEMORY = (
    "out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""How torch's allocators, CUDA's runtime and libraries, and Triton say it, each in a RuntimeError."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Largest memory use of a contestant (its first rank) in bytes."""

    resident: int
    """High-water mark of the process."""
    allocated: int | None = None
    """By tensors on the GPU; None without one."""
    reserved: int | None = None
    """By torch's allocator on the GPU; None without one."""

    @property
    def peak(self) -> int:
        """That of the device the contestant computes on."""
        return self.resident if self.allocated is None else self.allocated


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who steps."""

    name: str
    run: Callable[..., None]
    """``run(turn, *arguments)``, a function of a module: builds, calls ``turn.ready()`` and steps until ``Enough``."""
    arguments: tuple[Any, ...] = ()
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its processes, besides those of this one."""


@dataclass(slots=True)
class Result:
    """What a contestant did."""

    turns: list[Steps] = field(default_factory=list)
    """One per round, the warm-up left out."""
    facts: dict[str, Fact] = field(default_factory=dict)
    memory: Memory | None = None
    failure: str | None = None
    """Why it did not run to the end, in one line; None: it did."""
    out_of_memory: bool = False

    @property
    def seconds(self) -> list[float]:
        """Of every step."""
        return [second for turn in self.turns for second in turn.seconds]

    @property
    def timing(self) -> Timing:
        """Of a step."""
        return Timing.of(self.seconds)

    def phase(self, name: str) -> Timing:
        """Of one phase of a step."""
        return Timing.of([second for turn in self.turns for second in turn.phases[name]])

    @property
    def allocation_retries(self) -> int:
        """How often in these turns torch's allocator had to give memory back to the GPU before it got some."""
        return sum(turn.allocation_retries for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much each contestant steps."""

    rounds: int
    """Turns of each, two at least."""
    steps: int
    """Per turn, that count."""
    warm_up: int
    """Steps of each before the first round, which do not count."""
    settling: int = 0
    """Steps at the start of every turn that do not count: those for which a loader that reads ahead has had the turns
    of the others to read, and in which torch's allocator gets its memory back from the GPU."""
    limit_seconds: float = 600.0
    """For building, and for every turn; one that takes longer is stopped."""


def race(
    contestants: Sequence[Contestant], effort: Effort, *, device: str, before_turn: Callable[[], None] | None = None
) -> dict[str, Result]:
    """Let the contestants step in turns; one that fails is left out from then on.

    Args:
        contestants: with different names.
        effort: how much each steps.
        device: ``cuda`` or ``cpu``.
        before_turn: called here before every turn but the warm-up, while all contestants wait.

    Returns:
        By name, in the order given.
    """
    results = {contestant.name: Result() for contestant in contestants}
    workers: dict[str, _Worker] = {}
    folder = Path(tempfile.mkdtemp(prefix="fastdiff-bench-race-"))
    try:
        for number, contestant in enumerate(contestants):
            progress(f"{contestant.name}: building and warming up")
            worker = _Worker(contestant, effort.limit_seconds, device, folder / str(number))
            workers[contestant.name] = worker
            _attempt(worker, results[contestant.name], lambda w: w.ready(effort.warm_up))
        for number in range(effort.rounds):
            for name, worker in workers.items():
                if results[name].failure is None:
                    progress(f"round {number + 1} of {effort.rounds}: {name}")
                    if before_turn is not None:
                        before_turn()
                    _attempt(worker, results[name], lambda w: w.turn(effort.steps, effort.settling))
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
    """How many times as fast as ``theirs`` ``ours`` steps, round by round: above 1, ours is faster."""
    pairs = zip(ours.turns, theirs.turns, strict=True)
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
    """The processes of a contestant, one per rank, seen from here."""

    def __init__(self, contestant: Contestant, limit_seconds: float, device: str, folder: Path) -> None:
        self.result = Result()
        self._limit, self._log = limit_seconds, folder / "log"
        folder.mkdir()
        context = multiprocessing.get_context("spawn")
        port, ranks = free_port(), contestant.ranks
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}), **contestant.environment,
            }  # fmt: skip
            arguments = (theirs, device, folder, contestant.run, contestant.arguments)
            # No daemon, which could have no processes of its own; it ends with this one all the same (_Worker.kill, or
            # the end of the connection).
            process = context.Process(target=_work, args=arguments)
            with _environment(environment):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def ready(self, warm_up: int) -> None:
        self.result.facts.update(self._answers("ready")[0])
        if warm_up:
            self._go(warm_up)

    def turn(self, steps: int, settling: int) -> None:
        self.result.turns.append(self._go(settling + steps).without_first(settling))

    def finish(self) -> None:
        self._tell(0)
        facts, self.result.memory = self._answers("finished")[0]
        self.result.facts.update(facts)

    def kill(self) -> None:
        for connection in self._connections:
            connection.close()  # ends one that waits for its turn
        until = time.monotonic() + _PARTING_SECONDS
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()

    def last_words(self) -> str:
        """The end of what its processes printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:])

    def _go(self, steps: int) -> Steps:
        self._tell(steps)
        found: Steps = self._answers("steps")[0]
        return found

    def _tell(self, steps: int) -> None:
        for connection in self._connections:
            with suppress(BrokenPipeError):  # it has ended, as the answer will tell
                connection.send(steps)

    def _answers(self, kind: str) -> list[Any]:
        """What every rank says; a BenchError as soon as one fails: the others may wait for it for ever."""
        answers: dict[Connection, Any] = {}
        until = time.monotonic() + self._limit
        while len(answers) < len(self._connections):
            open_ = [connection for connection in self._connections if connection not in answers]
            heard = wait(open_, max(0.0, until - time.monotonic()))
            if not heard:
                raise self._silent()
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

    def _silent(self) -> BenchError:

        return BenchError("; ".join([f"no answer within {self._limit:.0f} s", *stale_locks()]))

    def _ended(self, process: BaseProcess) -> BenchError:
        process.join(self._limit)
        self.result.out_of_memory = process.exitcode == -signal.SIGKILL
        if self.result.out_of_memory:
            return BenchError("the process was killed, most likely by the system for its memory")
        return BenchError(f"the process ended without a word, with exit code {process.exitcode}")


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that a process started inside inherits: some are read when it first imports torch."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update(before)


def _work(
    connection: Connection,
    device: str,
    folder: Path,
    run: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    """The process of one rank, which prints into ``log`` in ``folder``."""
    with (folder / "log").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        turn = Turn(connection, torch.device(device), folder)
        try:
            run(turn, *arguments)
        except Enough:
            connection.send(("finished", (turn.facts, _memory(torch.device(device)))))
        else:
            raise RuntimeError("the contestant ended before it had enough steps")
    except BaseException as error:
        traceback.print_exc()
        connection.send(("out of memory" if ran_out(error) else "failed", _reason(error)))
    finally:
        # The ordinary end would wait for the other ranks, or for the threads of a loader. Semaphores have names in the
        # system, which the process of the race would warn of: they are taken back here.
        util._run_finalizers(0)  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def ran_out(error: BaseException) -> bool:
    """Whether memory ran out, of the GPU or of the system: torch.compile and others wrap the error that says so."""
    chain: list[BaseException] = []
    open_: list[BaseException | None] = [error]
    while open_:
        one = open_.pop()
        if one is not None and one not in chain:
            chain.append(one)
            open_ += [one.__cause__, one.__context__]
    return any(_says_no_memory(one) for one in chain)


def _says_no_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError)


def _memory(device: torch.device) -> Memory:
    if device.type != "cuda":
        return Memory(peak_resident_bytes())
    return Memory(peak_resident_bytes(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
