"""Guard of the optimizer step: heartbeat, loss spikes, and the consensus of the ranks."""

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
        self.save_due = False
        """True if the time for the next checkpoint has come (rank 0 alone has a clock for it)."""
        self.flags = StepFlags()
        """Flags and losses of the last step, over all ranks."""
        self._accumulation = accumulation
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
            Whether the step is to be discarded as a spike, decided at its last micro-batch (``Engine.backward``).
        """
        self._heartbeat.enter("backward")
        self._losses.append(losses.detach())
        return len(self._losses) == self._accumulation and self.spikes.discards(self._losses)

    def take_step(self, engine: Engine) -> bool:
        """Take the optimizer step and exchange the flags of the ranks beside it; called by all ranks.

        Returns:
            False if the step moved nothing: a gradient was not finite, or the step is discarded.

        Raises:
            DivergedError: see ``Engine.optimizer_step``.
        """
        self._heartbeat.enter("step")
        skips = engine.check_grads()
        self.consensus.start(self._losses, failed_save=self.failed_save, save_due=self.save_due, skips=skips)
        self._losses.clear()
        engine.optimizer_step()
        self.flags = self.consensus.wait()
        applied = engine.finish_step(skipped=self.flags.skipped)
        self._heartbeat.enter("callbacks")
        return applied
