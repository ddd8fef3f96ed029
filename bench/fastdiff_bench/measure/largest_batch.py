"""Search for the largest batch that fits into memory, in few trials, each in its own process.

Memory grows almost linearly with the batch: two small batches predict the limit, and real runs confirm it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil
import torch

from fastdiff_bench import BenchError
from fastdiff_bench.measure.interleaved import in_another_process

TRIALS = 12
"""Largest number of trials."""
_FIRST, _SECOND, _SMALLEST = 8, 4, 1
"""The first batch, the ratio of the second to the first, and the smallest batch."""
_LEAP = 16
"""Largest ratio of the next batch to the largest that ran: far extrapolation is unreliable."""
_SHARE_OF_CPU_MEMORY = 0.8
"""Usable share of the available memory: a process that takes too much is killed, or another one is."""
_SHARE_OF_GPU_MEMORY = 0.95
"""Usable share of the free memory: at the limit the allocator returns memory and asks again, which costs time."""
_PRECISION = 0.04
"""Relative precision of the result; it is also within one multiple of 8."""


Trials = Mapping[int, int | None]
"""Peak memory in bytes of each tried batch; None: it ran out of memory."""


class DoesNotFit(Exception):
    """A batch does not fit into memory."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of the search."""

    batch: int
    peak: int
    """Bytes."""
    trials: int


def largest(peak: Callable[[int], int], limit: int) -> Fit:
    """Find the largest batch, to about 4 %: a multiple of 8, or below 8 any number.

    Args:
        peak: runs a batch and returns its peak memory in bytes; raises DoesNotFit if it runs out of memory.
        limit: bytes that may be used.

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
    """Return the next batch to try; None: no further trial is useful."""
    fitting = _fitting(trials, limit)
    too_large = sorted(batch for batch in trials if batch not in fitting)
    if not fitting:
        return _FIRST if not too_large else _SMALLEST if too_large[0] > _SMALLEST else None
    best = max(fitting)
    batch = min(_predicted(trials, best, limit), best * _LEAP)
    if too_large and batch >= too_large[0]:
        batch = (best + too_large[0]) // 2
    batch = batch // 8 * 8 if batch >= 8 else batch
    return batch if batch > best * (1 + _PRECISION) else None


def _fitting(trials: Trials, limit: int) -> dict[int, int]:
    return {batch: peak for batch, peak in trials.items() if peak is not None and peak <= limit}


def _predicted(trials: Trials, best: int, limit: int) -> int:
    """Extrapolate to the limit, from the largest batch that fits and the next larger known one, or the next smaller."""
    known = {batch: peak for batch, peak in trials.items() if peak is not None}
    if len(known) == 1:
        return best * _SECOND
    other = min((b for b in known if b > best), default=max((b for b in known if b < best), default=best))
    per_sample = (known[other] - known[best]) / (other - best)
    return int(best + (limit - known[best]) / per_sample) if per_sample > 0 else best * _LEAP


def memory_limit(device: str, gib: float | None) -> int:
    """Return the usable bytes: ``gib``, or 95 % of the free GPU memory, or 80 % of the available host memory.

    Raises:
        BenchError: ``gib`` is not above 0.
    """
    if gib is not None and not gib > 0:
        raise BenchError(f"--memory {gib}: GiB, above 0")
    if gib is not None:
        return int(gib * 2**30)
    if device == "cpu":
        return int(_SHARE_OF_CPU_MEMORY * psutil.virtual_memory().available)
    # In another process: a CUDA context in this one would take some of the measured memory.
    return int(in_another_process(_free_on_gpu))


def _free_on_gpu() -> int:
    return int(_SHARE_OF_GPU_MEMORY * torch.cuda.mem_get_info()[0])
