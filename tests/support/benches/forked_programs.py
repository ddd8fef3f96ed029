"""Programs of the benchmarks in processes of the fork server, which has imported what each would import anew."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from fastdiff_bench.measure import interleaved
from tests.support.forked import fork_server
from tests.support.servers.ports import reserved_port


@contextmanager
def forked_programs() -> Iterator[None]:
    """Let a benchmark fork its programs instead of spawning them, with reserved ports."""
    context = fork_server()
    known = multiprocessing.get_context

    def get_context(method: str | None = None) -> object:
        return context if method == "spawn" else known(method)

    with (
        mock.patch.object(multiprocessing, "get_context", get_context),
        mock.patch.object(interleaved, "free_port", reserved_port),
    ):
        yield
