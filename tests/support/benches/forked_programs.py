"""Programs of the benchmarks in processes of the fork server, which has imported what each would import anew."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from unittest import mock

from tests.support.forked import end_with_the_tests, fork_server


class _Process(ForkServerProcess):
    """A process with the environment of the one that starts it, as one that is spawned."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        end_with_the_tests()
        os.environ.clear()
        os.environ.update(self.environment)
        import torch

        torch.set_num_threads(int(self.environment.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0)))
        super().run()


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]


@contextmanager
def forked_programs() -> Iterator[None]:
    """Let a benchmark fork its programs instead of spawning them, which is the only difference."""
    fork_server()
    known = multiprocessing.get_context

    def get_context(method: str | None = None) -> object:
        return _Context() if method == "spawn" else known(method)

    with mock.patch.object(multiprocessing, "get_context", get_context):
        yield
