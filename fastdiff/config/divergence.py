"""What is done about a loss that jumps, as a frozen dataclass. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fastdiff.errors import require

Policy = Literal["log", "skip", "rewind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceConfig:
    """What happens after a spike: a step whose mean loss is far above those of the steps before."""

    policy: Policy = "log"
    """log: name its samples and go on; skip: do not apply the step (waits for the loss of every step before its last
    backward pass); rewind: go back to the newest checkpoint before it and leave out the data from there to it."""
    sigmas: float = 6.0
    """A loss is a spike above mean + sigmas x standard deviation of the losses in the window."""
    window: int = 128
    """How many losses before count, spikes not among them; nothing is a spike before half of them are there."""
    limit: int = 3
    """skip: this many in a row are skipped, rewind: this many times in a run, and the next one ends the run; log: after
    this many in a row the level is the new normal."""

    def __post_init__(self) -> None:
        require(
            0 < self.sigmas < math.inf,
            f"--divergence.sigmas {self.sigmas}: a finite number above 0, for example 6",
        )
        require(
            self.window >= 4,
            f"--divergence.window {self.window}: at least 4, because half of it must have a standard deviation",
        )
        require(self.limit >= 1, f"--divergence.limit {self.limit}: at least 1")
