"""Clock of torch.compile: how long it has worked in this process, and on how many graphs."""

import time
from typing import Any


class CompileClock:
    """Seconds and graphs of torch.compile since ``start``; compilations that overlap in several threads count once."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._was_started = False

    def start(self) -> None:
        """Begin to count, or go on after ``torch._dynamo.reset``; otherwise a no-op."""
        from torch._dynamo.callback import callback_handler  # its import takes seconds

        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)
        self._was_started = True

    @property
    def graphs(self) -> int:
        """Graphs that were compiled in this process; 0 before ``start``."""
        if not self._was_started:
            return 0
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    @property
    def from_cache(self) -> int:
        """Parts of graphs, forward and backward, that this process took compiled from a cache."""
        return self._inductor("fxgraph_cache_hit")

    @property
    def anew(self) -> int:
        """Parts of graphs that it compiled."""
        return self._inductor("fxgraph_cache_miss") + self._inductor("fxgraph_cache_bypass")

    def _inductor(self, name: str) -> int:
        if not self._was_started:
            return 0
        from torch._dynamo.utils import counters

        return int(counters["inductor"][name])

    def read_seconds(self) -> float:
        """Return the seconds since the last read."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _begin(self, _: Any) -> None:
        self._since = time.perf_counter()

    def _end(self, _: Any) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since


compiled = CompileClock()
"""The clock of this process."""
