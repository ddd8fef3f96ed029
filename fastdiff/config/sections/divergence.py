"""Detection and handling of loss spikes, as a frozen dataclass. This module imports no torch."""

import math
from dataclasses import dataclass
from typing import Literal

from fastdiff.errors import require

Policy = Literal["log", "skip", "rewind"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceConfig:
    """Detection and handling of spikes: steps whose mean loss is far above the losses of the previous steps."""

    policy: Policy = "log"
    """log: record the samples and continue; skip: do not apply the step (the host waits for every loss before the last
    backward pass of its step); rewind: reload the newest checkpoint before the spike and skip the data between them."""
    sigmas: float = 6.0
    """Threshold: a loss above mean + sigmas x standard deviation of the window is a spike."""
    window: int = 128
    """Number of previous losses in the statistics, without spikes; detection starts when half of them are present."""
    limit: int = 3
    """skip: maximum of consecutive skipped steps; rewind: maximum of rewinds in a run; one spike more ends the run.
    log: after this many consecutive spikes, their level is the new baseline."""

    def __post_init__(self) -> None:
        require(
            0 < self.sigmas < math.inf, f"--divergence.sigmas {self.sigmas}: a finite number above 0, for example 6"
        )
        require(
            self.window >= 4,
            f"--divergence.window {self.window}: at least 4, because half of it must have a standard deviation",
        )
        require(self.limit >= 1, f"--divergence.limit {self.limit}: at least 1")
