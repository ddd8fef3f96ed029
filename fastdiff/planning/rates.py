"""Shares of a data sheet's figures that a step is assumed to reach, and intervals between a fast and a slow set.

One set serves every GPU and network. The fast one is that of a step at the limit of its libraries, the middle one that
of the budget's low level (``fastdiff_bench.emission.rates``), and published trainings agree with the middle within 30 %
(``tests/planning/test_published_runs.py``). None is measured by us: ``--from`` replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of a GPU's dense rate and of its memory's bandwidth."""

    matmul: float
    """Of products of the sizes that occur, with partial waves of tiles."""
    convolution: float
    attention: float
    bandwidth: float
    """Of all other kernels."""


FAST = Shares(matmul=0.73, convolution=0.65, attention=0.47, bandwidth=0.88)
MIDDLE = Shares(matmul=0.63, convolution=0.45, attention=0.33, bandwidth=0.75)
SLOW = Shares(matmul=0.42, convolution=0.30, attention=0.20, bandwidth=0.5)
LEVELS = (FAST, MIDDLE, SLOW)

FUSED = 3.4
"""Bytes that the kernels of compiled blocks move beside products, per byte that a forward pass saves: counted in
Inductor's code for DiT-XL/2 (945 MB and 282 MB per image) and for Stable Diffusion 2 (3.0 GB and 0.87 GB)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A prediction with its bounds."""

    low: float
    middle: float
    high: float

    def __mul__(self, factor: float) -> Interval:
        """Return all three times a factor above 0."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)

    def under(self, dividend: float) -> Interval:
        """Return ``dividend`` divided by each: the smallest result is that of the largest."""
        return Interval(dividend / self.high, dividend / self.middle, dividend / self.low)
