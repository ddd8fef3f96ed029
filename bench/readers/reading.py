"""A reader as a contestant: a step is a batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from bench.measure.session import Enough, Turn
from bench.readers.samples import Samples

Batch: TypeAlias = Mapping[str, "Tensor | npt.NDArray[Any]"]
"""The arrays of a batch by name, ``[B, ...]``; they may be overwritten by the next one."""

Reader: TypeAlias = Callable[[Samples, torch.device, int], Generator[Batch, None, None]]
"""``reader(samples, device, passes)`` gives the batches of so many passes over the samples, in random order."""

ENDLESS = 1_000_000
"""Passes."""


def run(turn: Turn, reader: Reader, samples: Samples, ahead: int) -> None:
    """Read batches, for ever; a contestant of ``bench.measure.interleaved``.

    One batch is read before the first step. Facts: ``read ahead``; ``workers' memory``, the bytes that the processes it
    started do not share with others in the end.

    Args:
        turn: of this process.
        reader: what reads.
        samples: what is read.
        ahead: batches that it may hold ready when a turn begins.
    """
    batches = reader(samples, turn.device, ENDLESS)
    next(batches)  # starts its threads and processes
    turn.ready(**{"read ahead": ahead})
    try:
        for _ in batches:
            turn.after_step()
    except Enough:
        workers = psutil.Process().children(recursive=True)
        turn.facts["workers' memory"] = sum(worker.memory_full_info().uss for worker in workers)
        raise
    finally:
        batches.close()
