"""Captures of work of the device as CUDA graphs, which the host launches at once."""

import gc
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from fastdiff.errors import ConfigError
from fastdiff.models.cost.memory import exhausted
from fastdiff.parallel.world import World

K = TypeVar("K")
T = TypeVar("T")

WARM_UP = 2
"""Steps in a process in which a section runs operation by operation before its capture: they load and tune kernels."""


@dataclass(slots=True)
class Pool:
    """Memory that graphs share: only one of them runs at a time, and only its results outlive it."""

    handle: Any = None
    """torch's name of it; None before the first capture."""


class CudaGraphs:
    """Captures sections.

    Sections warm up on the stream of the captures, as torch demands (https://docs.pytorch.org/docs/stable/notes/cuda.html):
    autograd binds the nodes that accumulate gradients to the stream on which they were made.

    Args:
        world: the ranks, which capture at the same time; no section has a collective.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps = 0
        self.captured = 0
        """Graphs so far."""

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Count an optimizer step that begins."""
        self._steps += 1

    def later(self, section: Callable[[], T], pool: Pool | None = None) -> Callable[[], T]:
        """Return a section as it runs in training: ``WARM_UP`` steps operation by operation, from then on as a graph.

        Steps, not calls, so that all sections are captured in the same one: what a graph holds is lost to work
        operation by operation, and no GPU has the memory of a micro-batch twice.

        All ranks call it alike; ConfigError on every rank: no graph can hold the section.

        Args:
            section: work of the device.
            pool: of the graphs that share memory with this one; None: it shares none.
        """
        first, work, captured = 0, section, False
        own = pool or Pool()

        def run() -> T:
            nonlocal first, work, captured
            first = first or self._steps
            if self._steps < first + WARM_UP:
                return self.warm_up(work)
            if not captured:
                work = self._world.on_all_ranks(lambda: self(work, own))  # drops the section, and what it refers to
                captured = True
                self.captured += 1
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

    def free(self, replays: MutableMapping[K, Callable[[], T]]) -> None:
        """Drop all graphs of a pool, and return its memory to the device; no later capture can use that pool."""
        torch.cuda.synchronize()  # one may still run
        replays.clear()
        torch.cuda.empty_cache()

    def __call__(self, section: Callable[[], T], pool: Pool) -> Callable[[], T]:
        """Capture a section and return its replay, whose result keeps its memory; ConfigError: no graph can do it."""
        if pool.handle is None:
            gc.collect()  # a cycle may keep nodes of autograd alive that are bound to another stream
        graph = torch.cuda.CUDAGraph()
        own = torch.cuda.current_stream()
        self._stream.wait_stream(own)
        try:
            # Only this thread is checked: others load data, write checkpoints and watch collectives meanwhile.
            with torch.cuda.graph(graph, pool.handle, self._stream, capture_error_mode="thread_local"):
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
        pool.handle = graph.pool()

        def replay() -> T:
            graph.replay()
            return found

        return replay
