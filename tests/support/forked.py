"""Real ranks from a server that has imported everything: a trial takes a second or two, so a test can make many.

Ranks may die here, and how each one ended is returned; ``processes.run_ranks`` fails if one dies. No rank outlives the
tests, however those end.
"""

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Self
from unittest import mock

from tests.support.servers.ports import reserved_port

_IMPORTED = f"{__package__}.imported"
_SHARED = "TESTS_FORK_SERVER"
"""Variable with the address of the server that processes share."""
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
"""Environment of every process that tests start: two ranks need no two GPUs, and CPU tensors go to the interpreter."""


@dataclass(frozen=True)
class Ended:
    """The end of a rank."""

    code: int
    """Exit code, or minus the number of the signal that killed it."""
    value: Any = None
    """Value of the function; None if it did not return."""
    trace: str | None = None
    """Traceback of the exception; None if there was none."""


def fork_server() -> ForkServerContext:
    """The server that starts processes which have imported everything, and see no GPU: a context of multiprocessing.

    It is that of this process, or the one that the workers share.
    """
    context = _Forked()
    if _SHARED in os.environ:
        _join(os.environ[_SHARED])
        return context
    context.set_forkserver_preload([_IMPORTED])
    with mock.patch.dict(os.environ, WITHOUT_GPU):
        forkserver.ensure_running()
    return context


def share_server() -> None:
    """Start the server, for this process and those that it starts: it ends with this one."""
    fork_server()
    os.environ[_SHARED] = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]


def _join(address: str) -> None:
    """Use the running server at an address, which another process keeps alive."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if "ensure_running" not in vars(server):
        server.ensure_running = resource_tracker.ensure_running
        server._forkserver_address = address
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # each request sends one; this keeps nothing


def _end_with_the_tests() -> None:
    """Kill this process when the one that asked the fork server for it ends, by whatever signal."""
    tests = multiprocessing.parent_process()
    assert tests is not None

    def follow() -> None:
        tests.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="end with the tests", daemon=True).start()


class Stream:
    """A descriptor that a process has in common with the one that starts it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> tuple[int, Any]:
        return self.number, reduction.DupFd(self.number)

    def __setstate__(self, state: tuple[int, Any]) -> None:
        self.number, given = state
        self._given: int = given.detach()

    def take(self) -> None:
        """Give it its number in the process that is started."""
        os.dup2(self._given, self.number)
        os.close(self._given)


class _Process(ForkServerProcess):
    """A process with the environment and the output of the one that starts it, as one that is spawned.

    It ends with the one that starts it.
    """

    def start(self) -> None:
        self.environment, self.streams = dict(os.environ), [Stream(1), Stream(2)]
        super().start()

    def run(self) -> None:
        _end_with_the_tests()
        for stream in self.streams:
            stream.take()
        os.environ.clear()
        os.environ.update(self.environment)
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0)))
        super().run()


class _Forked(ForkServerContext):
    Process = _Process  # type: ignore[assignment]


class Ranks:
    """Running ranks, which find the environment of the test; leaving the context kills those that still run.

    Args:
        function: called as ``function(world, *args)`` on every rank.
        args: picklable.
        ranks: how many gloo ranks.
        group_timeout_s: how long a rank waits for the others in a collective operation.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, ranks: int = 2, group_timeout_s: float = 120) -> None:
        context = fork_server()
        self._results: Any = context.Queue()
        self._port = reserved_port()
        environment = {
            **os.environ,
            **WITHOUT_GPU,
            **{"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)},
        }
        self.processes = [
            context.Process(target=_rank, args=(self._results, {**environment, **own}, group_timeout_s, function, args))
            for own in ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for process in self.processes:
            process.join()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all of them; before SIGKILL stop them, so that none ends because another one is gone."""
        for each in (signal.SIGSTOP, number) if number == signal.SIGKILL else (number,):
            for process in self.processes:
                if process.is_alive() and process.pid is not None:
                    with contextlib.suppress(ProcessLookupError):  # it died, and the server has not yet told
                        os.kill(process.pid, each)

    def wait(self, timeout_s: float = 240) -> list[Ended]:
        """Wait until all have ended; one that dies by a signal takes the others with it, as a launcher does."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, tuple[Any, str | None]] = {}
        with self:
            while running := [process.sentinel for process in self.processes if process.is_alive()]:
                connection.wait([self._results._reader, *running], deadline - time.monotonic())
                self._take(found)
                if any((process.exitcode or 0) < 0 for process in self.processes):
                    self.kill()
                assert time.monotonic() < deadline, f"ranks still run after {timeout_s} s; results of {sorted(found)}"
            self._take(found)
        return [
            Ended(process.exitcode or 0, *found.get(rank, (None, None))) for rank, process in enumerate(self.processes)
        ]

    def _take(self, found: dict[int, tuple[Any, str | None]]) -> None:
        """Take the results that are there."""
        with contextlib.suppress(queue.Empty):
            while True:
                rank, value, trace = self._results.get_nowait()
                found[rank] = (pickle.loads(value), trace)


def forked_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2, timeout_s: float = 240) -> list[Ended]:
    """Call ``function(world, *args)`` on real gloo ranks and return how each ended, in rank order."""
    return Ranks(function, *args, ranks=ranks).wait(timeout_s)


def values(ended: list[Ended]) -> list[Any]:
    """Return what each rank returned; fail if one did not end well."""
    for rank, end in enumerate(ended):
        assert end.trace is None, f"rank {rank} failed:\n{end.trace}"
        assert end.code == 0, f"rank {rank} ended with {end.code}"
    return [end.value for end in ended]


def _rank(
    results: Any,
    environment: dict[str, str],
    group_timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import torch

    from fastdiff.parallel.world import start_world, stop_world

    def tell(value: Any, trace: str | None) -> None:
        # As bytes: a queue would hand over a tensor as a handle, which is void once its process has ended.
        results.put((int(environment["RANK"]), pickle.dumps(value), trace))

    torch.set_num_threads(1)
    try:
        world = start_world(timeout_s=group_timeout_s)
        world.raise_on_all(None)  # gloo cannot start on a rank whose peer has already ended
        tell(function(world, *args), None)
    except BaseException:
        tell(None, traceback.format_exc())
        raise
    stop_world()
