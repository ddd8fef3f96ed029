"""The one clock of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come; schedules, cadences and the data order are functions of it."""

    samples: int = 0
    """Samples seen, over all ranks."""
    steps: int = 0
    """Optimizer steps taken, skipped ones included."""
    skipped: int = 0
    """Steps that were skipped because a gradient was not finite."""
    skipped_in_a_row: int = 0
    """How many of the last steps were skipped without one between them that was not."""

    @property
    def applied(self) -> int:
        """Steps that moved the weights; learning rate and EMA count these."""
        return self.steps - self.skipped

    def after(self, samples: int, *, applied: bool) -> Progress:
        """Return the progress after one more step of ``samples`` samples."""
        return Progress(
            samples=self.samples + samples,
            steps=self.steps + 1,
            skipped=self.skipped + (not applied),
            skipped_in_a_row=0 if applied else self.skipped_in_a_row + 1,
        )


@dataclass(frozen=True, slots=True)
class Every:
    """A cadence in optimizer steps; 0 means never."""

    steps: int

    def due(self, progress: Progress) -> bool:
        """True after every ``steps``-th step."""
        return self.steps > 0 and progress.steps % self.steps == 0
