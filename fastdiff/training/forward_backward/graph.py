"""Forward and backward pass of a micro-batch as a CUDA graph, which the host launches at once.

The graph has everything from the random numbers to the sums of gradients and losses. What differs between
micro-batches enters through a batch of static tensors; weights, sums and tables stay where they are. The first
micro-batch of a step, which overwrites the sums of gradients, has a graph of its own.

The update of the weights is not in it: between it and the passes the ranks exchange their flags, whose numbers, like
the learning rate, come from the host.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError, require
from fastdiff.models.cost.memory import exhausted
from fastdiff.training.engines.flat import FlatEngine
from fastdiff.training.forward_backward.micro_batch import ForwardBackward
from fastdiff.training.guard import StepGuard
from fastdiff.training.metrics import Meters

WARM_UP = 3
"""Micro-batches of a process that run operation by operation before the first capture.

They load and tune all kernels: those of the first micro-batch of a step, and those of the others.
"""
Section = Callable[[], Tensor]
"""Work of the device alone; returns the losses ``[micro]``."""


class GraphForwardBackward(ForwardBackward):
    """Both passes of a micro-batch, captured once and then replayed, on one GPU.

    Args:
        engine: of the run.
        objective: of the run; its timesteps do not learn from losses.
        meters: of the run.
        guard: of the run.
    """

    _engine: FlatEngine

    def __init__(self, engine: FlatEngine, objective: Objective, meters: Meters, guard: StepGuard) -> None:
        super().__init__(engine, objective, meters, guard)
        self._capture = CudaGraphs()
        self._replays: dict[bool, Section] = {}
        """By whether the micro-batch is the first of its step."""
        self._static: Batch | None = None
        self._taken = 0

    def __call__(self, batch: Batch) -> None:
        """Take the passes of one micro-batch; ConfigError if the passes cannot be captured."""
        with self._meters.phase("forward"):
            self._load(batch)
            losses = self._take().clone()  # the next replay overwrites them
            self._engine.end_micro_batch()
        self._meters.note(batch.position, losses)
        if self._guard.observe(losses):
            self._engine.discard()

    def _take(self) -> Tensor:
        """Run, or capture and replay; return the losses."""
        self._taken += 1
        if self._taken <= WARM_UP:
            return self._capture.warm_up(self._section)
        begins = self._engine.begins_step
        if begins not in self._replays:
            self._replays[begins] = self._capture(self._section)
        return self._replays[begins]()

    def _section(self) -> Tensor:
        """Run the passes of the static batch."""
        assert self._static is not None
        losses, drawn = self.forward(self._static)
        self._meters.count(losses, drawn.levels, drawn.importance, self._objective.parts)
        self._engine.add_gradient(losses.mean())
        return losses.detach()

    def _load(self, batch: Batch) -> None:
        """Copy a batch into the static one; ConfigError for other shapes or dtypes than those of the first."""
        if self._static is None:
            self._static = Batch(
                batch.latents.clone(),
                batch.position.clone(),
                {name: value.clone() for name, value in batch.condition.items()},
            )
            return
        for static, new in zip(_tensors(self._static), _tensors(batch), strict=True):
            require(
                (new.shape, new.dtype) == (static.shape, static.dtype),  # copy_ would broadcast and cast
                f"--performance.cuda_graph: a micro-batch has a tensor {list(new.shape)} {new.dtype}, expected "
                f"{list(static.shape)} {static.dtype} as in the first; leave the flag out",
            )
            static.copy_(new)


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield batch.latents
    yield batch.position
    for name in sorted(batch.condition):
        yield batch.condition[name]


class CudaGraphs:
    """Captures sections; their graphs share memory, as only one runs at a time and only its losses outlive it.

    Sections warm up on the stream of the captures, as torch demands (https://docs.pytorch.org/docs/stable/notes/cuda.html):
    autograd binds the nodes that accumulate gradients to the stream on which they were made.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm_up(self, section: Section) -> Tensor:
        """Run a section on the stream of the captures, between the work before and behind it; return its losses."""
        own = torch.cuda.current_stream()
        self._stream.wait_stream(own)
        with torch.cuda.stream(self._stream):
            losses = section()
        own.wait_stream(self._stream)
        return losses

    def __call__(self, section: Section) -> Section:
        """Capture a section and return its replay, whose losses keep their memory; ConfigError: no graph can do it."""
        if self._pool is None:
            gc.collect()  # a cycle may keep nodes of autograd alive that are bound to another stream
        graph = torch.cuda.CUDAGraph()
        own = torch.cuda.current_stream()
        self._stream.wait_stream(own)
        try:
            # Only this thread is checked: others load data and write checkpoints meanwhile, on streams of their own.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                losses = section()
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

        def replay() -> Tensor:
            graph.replay()
            return losses

        return replay
