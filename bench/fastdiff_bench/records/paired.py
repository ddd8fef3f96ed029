"""Paired differences over a few repetitions: mean, standard error, and significance after correction by Holm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SIGNIFICANT = 0.05
"""Probability below which a difference is not put down to chance."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of the differences of pairs."""

    mean: float
    error: float
    """Standard error, from the scatter of the pairs."""
    p: float
    """Probability of a mean as far from 0 if there is no difference (two-sided t-test)."""

    @property
    def is_small(self) -> bool:
        """Whether it is within two standard errors of 0."""
        return abs(self.mean) <= 2 * self.error


def difference(values: Sequence[float]) -> Difference:
    """Return the mean of ``values``, one of each pair; ValueError with fewer than two pairs."""
    if len(values) < 2:
        raise ValueError(f"{len(values)} pair has no scatter, expected at least 2")
    from scipy.stats import t  # of scikit-learn, which has the digits; the import takes seconds

    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    if error == 0:
        return Difference(mean, error, 1.0 if mean == 0 else 0.0)
    return Difference(mean, error, float(2 * t.sf(abs(mean) / error, len(values) - 1)))


def holm(probabilities: Sequence[float]) -> list[float]:
    """Correct probabilities for their number, in their order (Holm 1979, Scand. J. Statistics 6, 65-70).

    If no difference exists, the smallest of the results is below ``SIGNIFICANT`` with at most that probability.
    """
    count, largest = len(probabilities), 0.0
    found = [0.0] * count
    for rank, place in enumerate(sorted(range(count), key=probabilities.__getitem__)):
        largest = max(largest, min(1.0, (count - rank) * probabilities[place]))
        found[place] = largest
    return found
