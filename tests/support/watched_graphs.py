"""CUDA graphs on a CPU: each replay runs its section again, operation by operation, and is watched."""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock
from weakref import WeakSet

from torch import Tensor

from fastdiff.parallel.world import World
from fastdiff.training import build as building
from fastdiff.training.forward_backward import graph
from fastdiff.training.forward_backward.cuda_graphs import CudaGraphs, Pool
from tests.support.dispatch_modes import Replay

K = TypeVar("K")
T = TypeVar("T")


class Watched(CudaGraphs):
    """Captures on a CPU: each replay runs its section again, is watched, and leaves its result where the first did."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.replays: list[list[Replay]] = []
        """Of each section that was captured."""
        self.pools: list[Pool] = []
        """That of each section that was captured."""
        self.left: list[int] = []
        """How many graphs were there after some were dropped, each time."""
        self._graphs: WeakSet[Callable[[], object]] = WeakSet()

    def __call__(self, section: Callable[[], T], pool: Pool) -> Callable[[], T]:
        own: list[Replay] = []
        results: list[T] = []
        self.replays.append(own)
        self.pools.append(pool)

        def replay() -> T:
            own.append(Replay())
            with own[-1]:
                results.append(section())
            kept, *new = results
            if isinstance(kept, Tensor) and new:
                kept.copy_(new.pop())  # type: ignore[arg-type]
            results[:] = [kept]
            return kept

        self._graphs.add(replay)
        return replay

    def warm_up(self, section: Callable[[], T]) -> T:
        return section()

    def free(self, replays: MutableMapping[K, Callable[[], T]]) -> None:
        replays.clear()
        self.left.append(len(self._graphs))


@contextmanager
def watching(kind: type[Watched] = Watched) -> Iterator[list[Watched]]:
    """Let a CPU capture; yield the captures of each run."""
    found: list[Watched] = []

    def watched(world: World) -> Watched:
        found.append(kind(world))
        return found[-1]

    with (
        mock.patch.object(graph, "CudaGraphs", watched),
        mock.patch.object(building, "require_static", return_value=None),
    ):
        yield found
