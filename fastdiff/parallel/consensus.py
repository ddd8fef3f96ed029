"""Agreement of all ranks per step: stop requests, failed and due saves, the mean loss, and whether to skip the step.

One all-reduce per step runs on the device, of five numbers, or of six with an engine that leaves on the device whether
the step is skipped. It is queued before the update of the weights, and the host reads it after: it waits for the
gradients while the device has the update to do. Every rank acts on the same numbers at the same step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor

from fastdiff.parallel.preemption import StopRequest
from fastdiff.parallel.world import World


@dataclass(frozen=True, slots=True)
class StepFlags:
    """The flags and loss sums of one step, reduced over all ranks."""

    stop: bool = False
    """A rank was asked to stop."""
    failed_save: bool = False
    """A rank could not write its part of an asynchronous save."""
    save_due: bool = False
    """The time for the next checkpoint has come."""
    loss_sum: float = 0.0
    """Sum of the finite losses of the step, over all samples."""
    loss_count: float = 0.0
    """Number of finite losses."""
    skipped: bool = False
    """The update changes nothing, as ``Engine.check_grads`` says."""


class Consensus:
    """The all-reduce of each step's flags and losses.

    Args:
        world: the ranks.
        stop: stop requests to this rank; None: it never receives one.
    """

    def __init__(self, world: World, stop: StopRequest | None = None) -> None:
        self._world = world
        self._stop = stop
        self._sums = torch.zeros(5, dtype=torch.float64)
        self._work: torch.distributed.Work | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def stop_reason(self) -> str | None:
        """The cause of the request to stop this rank; None without a request."""
        return None if self._stop is None else self._stop.reason

    def start(
        self, losses: Iterable[Tensor], *, failed_save: bool, save_due: bool = False, skips: Tensor | None = None
    ) -> None:
        """Start the all-reduce of this step without waiting for it.

        Args:
            losses: one tensor ``[B]`` per micro-batch of this step.
            failed_save: this rank could not write its part of a save.
            save_due: by the clock of this rank a checkpoint is due.
            skips: scalar on the device, not zero if the step changes nothing; None: the host knows it.
        """
        flags = torch.tensor([self.stop_reason is not None, failed_save, save_due], dtype=torch.float64)
        every = torch.cat([micro.detach() for micro in losses])  # micro-batches x [B] -> [samples of the step]
        finite = torch.isfinite(every)
        loss = torch.stack([torch.where(finite, every, 0.0).sum(dtype=torch.float64), finite.sum().double()])
        own = [] if skips is None else [skips.double().view(1)]
        self._sums = torch.cat([flags.to(self._world.device, non_blocking=True), loss, *own])
        if self._world.size > 1:
            self._work = torch.distributed.all_reduce(self._sums, async_op=True)
        if self._sums.is_cuda:
            self._copy_to_host()

    def wait(self) -> StepFlags:
        """Wait for the all-reduce of ``start`` and return its result, equal on every rank."""
        if self._copied is not None:
            self._copied.synchronize()
        elif self._work is not None:
            self._work.wait()
        stop, failed_save, save_due, loss_sum, loss_count, *skips = self._sums.tolist()
        skipped = any(count > 0 for count in skips)
        return StepFlags(stop > 0, failed_save > 0, save_due > 0, loss_sum, loss_count, skipped)

    def _copy_to_host(self) -> None:
        """Queue the copy to the host now: queued after the optimizer step, it would wait for that step's kernels."""
        if self._work is not None:
            self._work.wait()  # blocks the stream, not this thread
        on_host = torch.empty(self._sums.shape, dtype=self._sums.dtype, pin_memory=True)
        self._sums = on_host.copy_(self._sums, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()
