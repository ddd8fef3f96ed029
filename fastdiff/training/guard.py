"""Guard of the optimizer step: heartbeat, loss spikes, lack of memory, and the consensus of the ranks."""

from __future__ import annotations

from torch import Tensor

from fastdiff.parallel.consensus import Consensus, StepFlags
from fastdiff.parallel.heartbeat import Heartbeat
from fastdiff.training.engines.base import Engine
from fastdiff.training.spikes import Spikes


class StepGuard:
    """Guard of every optimizer step, the same on every rank.

    Args:
        consensus: exchange of flags and losses between the ranks.
        spikes: the losses of earlier steps.
        heartbeat: of this rank.
        accumulation: micro-batches of a step.
    """

    def __init__(self, consensus: Consensus, spikes: Spikes, heartbeat: Heartbeat, accumulation: int) -> None:
        self.consensus, self.spikes = consensus, spikes
        self.failed_save = False
        """True if this rank could not write its part of a background save."""
        self.flags = StepFlags()
        """Flags and losses of the last step, over all ranks."""
        self.accumulation = accumulation
        self.lost: str | None = None
        """Where and why this rank ran out of memory in the current step (``memory.halving``); None: it has not."""
        self._repeats = False
        self._heartbeat = heartbeat
        self._losses: list[Tensor] = []

    @property
    def discarded(self) -> bool:
        """Whether the last step was discarded as a spike."""
        return self.spikes.discarded

    def observe(self, losses: Tensor) -> bool:
        """Record the losses of a micro-batch before its backward pass; called by all ranks.

        Args:
            losses: ``[micro]`` fp32, of this rank.

        Returns:
            Whether the step is to be discarded (``Engine.backward``): as a spike, decided at the last micro-batch, or
            as void.
        """
        self._heartbeat.enter("backward")
        if self._repeats:
            self._repeats = False
            return True
        step = [*self._losses, losses.detach()]
        discards = len(step) == self.accumulation and self.spikes.discards(step)
        self._losses = step  # only now: out of memory before that, the repetition still has to exchange the losses
        return discards or self.lost is not None

    @property
    def observed(self) -> int:
        """Number of micro-batches of the current step whose losses are recorded."""
        return len(self._losses)

    def lose(self, cause: str, *, observed: bool) -> None:
        """Note that this rank ran out of memory: the step is void.

        Args:
            cause: where and why.
            observed: the losses of this micro-batch are recorded; those of its repetition are not.
        """
        self.lost, self._repeats = cause, observed

    def take_step(self, engine: Engine) -> bool:
        """Take the optimizer step and exchange the flags of the ranks beside or before it; called by all ranks.

        Returns:
            False if the step moved nothing: a gradient was not finite, or the step is discarded.

        Raises:
            DivergedError: see ``Engine.update``.
        """
        self._heartbeat.enter("step")
        lost, skips = self.lost is not None, engine.skips()
        self.consensus.start(self._losses, failed_save=self.failed_save, out_of_memory=lost, skips=skips)
        self._losses.clear()
        if skips is None:  # ``update`` reads the device in any case; ``discard`` must precede it
            self.flags = self.consensus.wait()
            if self.flags.out_of_memory:
                engine.discard()
        engine.update()
        if skips is not None:
            self.flags = self.consensus.wait()
        applied = engine.settle(skipped=self.flags.skipped)
        self._heartbeat.enter("callbacks")
        return applied
