"""Means by noise level, with standard errors: 16 bins of the log SNR, with equal edges for every schedule."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_WIDTH = 1.25
SNR_EDGES = tuple(_WIDTH * n - 8.75 for n in range(15))
"""Inner edges of the bins, natural logarithms of alpha^2 / sigma^2; the outer bins are open."""
BINS = len(SNR_EDGES) + 1
SNR_CENTRES = tuple(_WIDTH * n - 9.375 for n in range(BINS))
"""Centre of each bin; the outer bins count as wide as the others."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over samples."""

    count: int
    mean: float
    """NaN without samples."""
    error: float
    """Standard error; NaN with fewer than two samples."""


def mean_of(values: Floats) -> Mean:
    """Return the mean of samples and its standard error.

    The noise levels of a validation are spread evenly, so the change of the loss with the level does not add to the
    error. The variance is therefore estimated from neighbours in noise level, ``sum((l[k+1] - l[k])^2) / (2 (n -
    1))``, the usual estimator for systematic samples (Wolter 2007, "Introduction to Variance Estimation", chapter 8).

    Args:
        values: ``[n]`` in ascending order of the noise level.
    """
    count = len(values)
    with np.errstate(invalid="ignore"):  # infinities minus infinities
        mean = float(values.mean()) if count else math.nan
        variance = float((np.diff(values) ** 2).sum()) / (2 * (count - 1)) if count > 1 else math.nan
    return Mean(count, mean, math.sqrt(variance / count) if count else math.nan)


def by_log_snr(log_snr: npt.NDArray[np.floating], values: Floats) -> tuple[Mean, list[Mean]]:
    """Return the mean over all samples, and the mean of each bin.

    Args:
        log_snr: ``[n]`` log SNR of each sample.
        values: ``[n]`` in the same order.
    """
    ascending = np.argsort(-log_snr, kind="stable")
    ordered, bins = values[ascending], np.digitize(log_snr[ascending], SNR_EDGES)
    return mean_of(ordered), [mean_of(ordered[bins == number]) for number in range(BINS)]


def name_of(number: int) -> str:
    """Return the range of a bin in words."""
    if number == 0:
        return f"below {SNR_EDGES[0]:.2f}"
    if number == BINS - 1:
        return f"above {SNR_EDGES[-1]:.2f}"
    return f"{SNR_EDGES[number - 1]:.2f} to {SNR_EDGES[number]:.2f}"
