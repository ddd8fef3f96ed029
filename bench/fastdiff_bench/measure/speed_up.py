"""Speed-up of a training method: how many fewer steps reach the final loss of a baseline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

GAIN = 1.15
"""Lower two-sigma bound of a speed-up that must be exceeded to call a method a gain."""
WORST = 0.95
"""Least speed-up of a single seed of a gain."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Validation losses of a run."""

    steps: Sequence[int]
    """Ascending."""
    losses: Sequence[float]
    """Finite."""

    @property
    def last(self) -> float:
        """Loss at the end."""
        return self.losses[-1]

    def reaches(self, loss: float) -> float | None:
        """Return the step at which the loss is first that low, interpolated linearly; None: it never is."""
        if self.losses[0] <= loss:
            return float(self.steps[0])
        for (before, high), (after, low) in pairwise(zip(self.steps, self.losses, strict=True)):
            if low <= loss:
                return before + (after - before) * (high - loss) / (high - low)
        return None


def speed_up(baseline: Curve, other: Curve) -> float:
    """Return the steps of the baseline over those of the other run to the same loss.

    The loss is the final one of the baseline. A run that does not reach it is slower: then the loss is the final one of
    that run, which the baseline reaches earlier. 0: the baseline had it before its first validation. Both runs have the
    same number of steps, and rates that fall to 0 at their end, so a speed-up above 1 is an underestimate: a run
    planned for fewer steps would have lowered its rate earlier.
    """
    reached = other.reaches(baseline.last)
    if reached is not None:
        return baseline.steps[-1] / reached
    behind = baseline.reaches(other.last)
    assert behind is not None  # the baseline ends below
    return behind / other.steps[-1] if behind > baseline.steps[0] else 0.0


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Speed-ups of a method, one per seed, and their geometric mean."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        """Geometric mean; 0 if one of them is 0."""
        return math.exp(float(np.mean(np.log(self.values)))) if min(self.values) > 0 else 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Two standard errors of the mean of the logarithms below and above."""
        if min(self.values) <= 0:
            return 0.0, max(self.values)
        error = float(np.std(np.log(self.values), ddof=1)) / math.sqrt(len(self.values))
        return self.mean * math.exp(-2 * error), self.mean * math.exp(2 * error)

    @property
    def verdict(self) -> str:
        """Gain, loss, or no gain shown."""
        low, high = self.bounds
        if low > GAIN and min(self.values) >= WORST:
            return "gain"
        return "slower" if high < 1 else "no gain shown"
