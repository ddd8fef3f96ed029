"""Loss spikes by the rule of MaxText and OLMo-core: above mean + 6 sigma of the last 128 steps.

https://github.com/AI-Hypercomputer/maxtext, ``skip_step_on_spikes`` (mean and sample deviation of the losses, decided
once half of the window is filled). Unlike there, spikes do not enter the window, where the first of two would raise the
threshold of the second.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.config.sections.divergence import DivergenceConfig
from fastdiff.parallel.world import World


@dataclass(frozen=True, slots=True)
class Spike:
    """A step whose mean loss is above the threshold."""

    loss: float
    """Mean over the samples of all ranks."""
    threshold: float
    in_a_row: int
    """Number of consecutive spikes, this one included."""


class Spikes:
    """Losses of the steps so far, and the verdict on the last one; the same on every rank.

    Args:
        config: definition of a spike, and the policy.
        batch_samples: samples of an optimizer step.
        world: the ranks.
    """

    def __init__(self, config: DivergenceConfig, batch_samples: int, world: World) -> None:
        self._config = config
        self._samples = batch_samples
        self._world = world
        self._accepted: list[float] = []
        self._in_a_row = 0
        self.last: Spike | None = None
        """The last step, if it was a spike."""

    @property
    def discarded(self) -> bool:
        """Whether the last step was discarded as a spike."""
        return self._config.policy == "skip" and self.last is not None

    def discards(self, step: Sequence[Tensor]) -> bool:
        """Decide before the last backward pass of a step whether the step is to be discarded; called by all ranks.

        Only the policy skip discards steps, and only it waits here for the losses of all ranks.

        Args:
            step: the losses of this rank, ``[micro]`` of each micro-batch of the step.
        """
        if self._config.policy != "skip":
            return False
        losses = torch.cat(list(step))
        finite = torch.isfinite(losses)
        total = torch.stack([torch.where(finite, losses, 0.0).sum(dtype=torch.float64), finite.sum().double()])
        loss_sum, count = self._world.sum_(total).tolist()
        self._judge(loss_sum, count)
        return self.last is not None

    def see(self, loss_sum: float, count: float, *, applied: bool) -> Spike | None:
        """Record a step, and return it if it was a spike.

        Args:
            loss_sum: sum of the finite losses of all ranks.
            count: their number.
            applied: False for a skipped step, which is not judged; the policy skip has judged it already.
        """
        if self._config.policy != "skip":
            self._judge(loss_sum, count if applied else 0.0)
        return self.last

    def is_spike(self, loss_sum: float, count: float, *, applied: bool) -> bool:
        """Return whether ``see`` would find this step to be a spike that was not discarded."""
        return self._config.policy != "skip" and applied and self._is_above(loss_sum, count)

    def _is_above(self, loss_sum: float, count: float) -> bool:
        threshold = self._threshold()
        return count == self._samples and threshold is not None and loss_sum / count > threshold

    def _judge(self, loss_sum: float, count: float) -> None:
        """Set ``last``; ``divergence.NonFiniteGuard`` handles steps with non-finite losses."""
        self.last = None
        if count != self._samples:
            return
        loss, threshold = loss_sum / count, self._threshold()
        if threshold is None or loss <= threshold:
            self._accepted = [*self._accepted, loss][-self._config.window :]
            self._in_a_row = 0
            return
        self._in_a_row += 1
        self.last = Spike(loss, threshold, self._in_a_row)

    def _threshold(self) -> float | None:
        if len(self._accepted) < self._config.window // 2:
            return None
        mean = math.fsum(self._accepted) / len(self._accepted)
        variance = math.fsum((loss - mean) ** 2 for loss in self._accepted) / (len(self._accepted) - 1)
        return mean + self._config.sigmas * math.sqrt(variance)

    def forget(self) -> None:
        """Discard the history, at another level of the loss."""
        self._accepted, self._in_a_row = [], 0

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, the same on every rank."""
        return {
            "accepted": torch.tensor(self._accepted, dtype=torch.float64),
            "in_a_row": torch.tensor([self._in_a_row], dtype=torch.int64),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint; an empty one, of an older version, starts anew."""
        self.forget()
        self.last = None
        if state:
            self._accepted = state["accepted"].tolist()[-self._config.window :]
            self._in_a_row = int(state["in_a_row"])
