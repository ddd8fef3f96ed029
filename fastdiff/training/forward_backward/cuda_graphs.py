"""Captures of work of the device as CUDA graphs, which the host launches at once."""

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fastdiff.errors import ConfigError
from fastdiff.models.cost.memory import exhausted
from fastdiff.parallel.world import World

T = TypeVar("T")

WARM_UP = 2
"""Steps in a process in which a section runs operation by operation before its capture: they load and tune kernels."""


class CudaGraphs:
    """Captures sections; their graphs share memory, as only one runs at a time and only its results outlive it.

    Sections warm up on the stream of the captures, as torch demands (https://docs.pytorch.org/docs/stable/notes/cuda.html):
    autograd binds the nodes that accumulate gradients to the stream on which they were made.

    Args:
        world: the ranks, which capture at the same time; no section has a collective.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps = 0
        self._pool: Any = None
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Count an optimizer step that begins."""
        self._steps += 1

    def later(self, section: Callable[[], T]) -> Callable[[], T]:
        """Return a section as it runs in training: ``WARM_UP`` steps operation by operation, from then on as a graph.

        Steps, not calls, so that all sections are captured in the same one: what a graph holds is lost to work
        operation by operation, and no GPU has the memory of a micro-batch twice.

        All ranks call it alike; ConfigError on every rank: no graph can hold the section.
        """
        first, work, captured = 0, section, False

        def run() -> T:
            nonlocal first, work, captured
            first = first or self._steps
            if self._steps < first + WARM_UP:
                return self.warm_up(work)
            if not captured:
                work = self._world.on_all_ranks(lambda: self(work))  # drops the section, and what it refers to
                captured = True
            return work()

        return run

    def warm_up(self, section: Callable[[], T]) -> T:
        """Run a section on the stream of the captures, between the work before and behind it; return its result."""
        own = torch.cuda.current_stream()
        self._stream.wait_stream(own)
        with torch.cuda.stream(self._stream):
            found = section()
        own.wait_stream(self._stream)
        return found

    def __call__(self, section: Callable[[], T]) -> Callable[[], T]:
        """Capture a section and return its replay, whose result keeps its memory; ConfigError: no graph can do it."""
        if self._pool is None:
            gc.collect()  # a cycle may keep nodes of autograd alive that are bound to another stream
        graph = torch.cuda.CUDAGraph()
        own = torch.cuda.current_stream()
        self._stream.wait_stream(own)
        try:
            # Only this thread is checked: others load data, write checkpoints and watch collectives meanwhile.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                found = section()
        except RuntimeError as error:
            if exhausted(error):
                raise
            # The end of a capture that failed is an error, too, and says less.
            reason = " ".join(str(error.__context__ or error).split())[:300]
            raise ConfigError(
                f"--performance.cuda_graph: this run cannot be captured ({reason}); leave the flag out"
            ) from error
        own.wait_stream(self._stream)
        self._pool = graph.pool()

        def replay() -> T:
            graph.replay()
            return found

        return replay
