"""Progress of a run, the one clock that all schedules follow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run; schedules, cadences and the data order are functions of it."""

    samples: int = 0
    """Samples seen, over all ranks."""
    steps: int = 0
    """Optimizer steps taken, skipped ones included."""
    skipped: int = 0
    """Steps without effect on the weights: not finite, discarded as a spike, or undone by a rewind."""
    skipped_in_a_row: int = 0
    """Number of consecutive non-finite steps since the last applied one."""
    rewinds: int = 0
    """Number of times that the run went back to a checkpoint because of a spike."""

    @property
    def applied(self) -> int:
        """Steps that moved the weights; learning rate and EMA count these."""
        return self.steps - self.skipped

    def after(self, samples: int, *, applied: bool, discarded: bool = False) -> Progress:
        """Return the progress after one more step of ``samples`` samples.

        Args:
            samples: of the step, over all ranks.
            applied: False for a step without effect on the weights.
            discarded: whether it was not applied because it was a spike; spikes have their own limit.
        """
        in_a_row = self.skipped_in_a_row + (not discarded)
        return Progress(
            samples=self.samples + samples,
            steps=self.steps + 1,
            skipped=self.skipped + (not applied),
            skipped_in_a_row=0 if applied else in_a_row,
            rewinds=self.rewinds,
        )

    def behind(self, later: Progress) -> Progress:
        """Return the progress after a rewind: these weights, continued at the data position of ``later``.

        The steps in between count as skipped, and ``later`` counts as one more rewind.
        """
        return Progress(
            samples=later.samples,
            steps=later.steps,
            skipped=self.skipped + later.steps - self.steps,
            rewinds=later.rewinds + 1,
        )


@dataclass(frozen=True, slots=True)
class Every:
    """A cadence in optimizer steps; 0 means never."""

    steps: int
    first: int | None = None
    """Step of the first time; None: ``steps``."""

    def due(self, progress: Progress) -> bool:
        """True after step ``first``, and after every ``steps``-th step from there."""
        if self.steps == 0 or self.first is None:
            return self.steps > 0 and progress.steps % self.steps == 0
        return progress.steps >= self.first and (progress.steps - self.first) % self.steps == 0
