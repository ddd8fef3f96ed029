"""The largest batch that fits into memory, found in few trials, each in a process of its own.

Memory grows almost linearly with the batch: two small batches say where to look, and what really ran decides.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import psutil
import torch

from bench import BenchError

TRIALS = 12
"""At most."""
_FIRST, _SECOND, _SMALLEST = 8, 4, 1
"""The batch to begin with, how many times as large the second is, and the last resort."""
_LEAP = 16
"""How many times as large as the largest batch that ran the next one may be: far away a line is a guess."""
_SHARE_OF_CPU_MEMORY = 0.8
"""Of what is available: a process that takes too much is killed, or another one is."""
_SHARE_OF_GPU_MEMORY = 0.95
"""Of what is free: a batch that just fits makes the allocator give memory back and ask again, which costs time."""
_PRECISION = 0.04
"""What is found is this close to the largest batch, as a share of it, or to the next multiple of 8."""


Trials = Mapping[int, int | None]
"""Peak memory in bytes of each batch that was tried; None: it ran out of memory."""


class DoesNotFit(Exception):
    """There is not enough memory for this batch."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What was found."""

    batch: int
    peak: int
    """Bytes."""
    trials: int


def largest(peak: Callable[[int], int], limit: int) -> Fit:
    """Find the largest batch, to about 4 %: a multiple of 8, or below 8 any number.

    Args:
        peak: runs a batch and returns its peak memory in bytes; raises DoesNotFit if that is not possible.
        limit: how many bytes there are.

    Raises:
        DoesNotFit: not even one sample fits.
    """
    trials: dict[int, int | None] = {}
    while len(trials) < TRIALS and (batch := next_batch(trials, limit)) is not None:
        try:
            trials[batch] = peak(batch)
        except DoesNotFit:
            trials[batch] = None
    fitting = _fitting(trials, limit)
    if not fitting:
        raise DoesNotFit(f"not even one sample fits into {limit / 2**30:.2f} GiB")
    best = max(fitting)
    return Fit(best, fitting[best], len(trials))


def next_batch(trials: Trials, limit: int) -> int | None:
    """The batch to try after these; None: none is worth trying."""
    fitting = _fitting(trials, limit)
    too_large = sorted(batch for batch in trials if batch not in fitting)
    if not fitting:
        return _FIRST if not too_large else _SMALLEST if too_large[0] > _SMALLEST else None
    best = max(fitting)
    batch = min(_predicted(trials, best, limit), best * _LEAP)
    if too_large and batch >= too_large[0]:
        batch = max(too_large[0] - _step_down(too_large), (best + too_large[0]) // 2)
    batch = batch // 8 * 8 if batch >= 8 else batch
    return batch if batch > best * (1 + _PRECISION) else None


def _fitting(trials: Trials, limit: int) -> dict[int, int]:
    return {batch: peak for batch, peak in trials.items() if peak is not None and peak <= limit}


def _predicted(trials: Trials, best: int, limit: int) -> int:
    """Where the line from the largest batch that fits meets the limit: to the next larger one, or the next smaller."""
    known = {batch: peak for batch, peak in trials.items() if peak is not None}
    if len(known) == 1:
        return best * _SECOND
    other = min((b for b in known if b > best), default=max((b for b in known if b < best), default=best))
    per_sample = (known[other] - known[best]) / (other - best)
    return int(best + (limit - known[best]) / per_sample) if per_sample > 0 else best * _LEAP


def _step_down(too_large: Sequence[int]) -> int:
    """Twice as far as the last time, if that was not enough."""
    smallest = too_large[0]
    last = too_large[1] - smallest if len(too_large) > 1 else 0
    return max(8 if smallest > 8 else 1, int(smallest * _PRECISION), 2 * last)


def memory_limit(device: str, gib: float | None) -> int:
    """Bytes that may be used: ``gib``, or 95 % of what is free on the GPU, or 80 % of what is available to a CPU.

    Raises:
        BenchError: ``gib`` is not above 0.
    """
    if gib is not None and not gib > 0:
        raise BenchError(f"--memory {gib}: GiB, above 0")
    if gib is not None:
        return int(gib * 2**30)
    if device == "cpu":
        return int(_SHARE_OF_CPU_MEMORY * psutil.virtual_memory().available)
    # In another process: a context of this one would take some of the memory that is to be measured.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_free_on_gpu).result()


def _free_on_gpu() -> int:
    return int(_SHARE_OF_GPU_MEMORY * torch.cuda.mem_get_info()[0])
