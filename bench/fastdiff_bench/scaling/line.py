"""Linear fit of the time of a collective by its size."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Line:
    """Linear fit of a collective's time over a fixed number of ranks: ``latency + per_byte * bytes`` seconds."""

    latency: float
    per_byte: float
    residual: float
    """Root mean square of the relative residuals."""

    def seconds(self, size: float) -> float:
        """Return the seconds for a vector of ``size`` bytes."""
        return self.latency + self.per_byte * size


def fit(points: Sequence[tuple[int, float]]) -> Line:
    """Fit a line through (bytes, seconds) by least squares of the relative residuals; neither term is negative."""
    size, seconds = np.array(points, dtype=np.float64).T
    columns = np.stack([1 / seconds, size / seconds], axis=1)
    found = np.linalg.lstsq(columns, np.ones(len(size)), rcond=None)[0]
    if found.min() < 0:
        kept = int(found.argmax())
        found = np.zeros(2)
        found[kept] = columns[:, kept].sum() / (columns[:, kept] ** 2).sum()
    residual = float(np.sqrt(np.mean((columns @ found - 1) ** 2)))
    return Line(float(found[0]), float(found[1]), residual)
