"""A reader as an interleaved program: a step is a batch."""

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from fastdiff_bench.measure.session import Enough, StepTimer
from fastdiff_bench.readers.samples import Samples

Batch: TypeAlias = Mapping[str, "Tensor | npt.NDArray[Any]"]
"""Arrays of a batch by name, ``[B, ...]``; the next batch may overwrite them."""

Reader: TypeAlias = Callable[[Samples, torch.device, int], Generator[Batch, None, None]]
"""``reader(samples, device, passes)`` yields the batches of that many passes over the samples, in random order."""

ENDLESS = 1_000_000
"""Number of passes."""


def run(timer: StepTimer, reader: Reader, samples: Samples, ahead: int) -> None:
    """Read batches without end; run by ``fastdiff_bench.measure.interleaved``.

    One batch is read before the first step. Facts: ``read ahead``; ``workers' memory``, the unshared bytes of its
    worker processes at the end.
    """
    batches = reader(samples, timer.device, ENDLESS)
    next(batches)  # starts its threads and processes
    timer.ready(**{"read ahead": ahead})
    try:
        for _ in batches:
            timer.after_step()
    except Enough:
        workers = psutil.Process().children(recursive=True)
        timer.facts["workers' memory"] = sum(worker.memory_full_info().uss for worker in workers)
        raise
    finally:
        batches.close()
