"""Stages of a pipeline that work at the same time, and how long each of them was at work."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_END = object()


def read_ahead(
    items: Generator[T, None, None], depth: int, *, start: Callable[[], None] | None = None
) -> Generator[T, None, None]:
    """Run a generator in a thread of its own, at most ``depth`` items ahead.

    Args:
        items: What it raises is raised here in its place. It is closed at the end, or when the result is closed.
        depth: At least 1.
        start: Called first in that thread.

    Yields:
        The items, in order.
    """
    with ThreadPoolExecutor(1, initializer=start) as thread:
        try:
            waiting = deque(thread.submit(next, items, _END) for _ in range(depth))
            while (item := waiting.popleft().result()) is not _END:
                waiting.append(thread.submit(next, items, _END))
                yield item  # type: ignore[misc]
        finally:
            thread.shutdown(cancel_futures=True)
            items.close()


class Stopwatch:
    """Seconds by stage; each stage belongs to one thread."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the seconds that the context lasts."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - begin
