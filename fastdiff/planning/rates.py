"""Shares of a data sheet's figures that a step reaches, and intervals between a fast and a slow set.

One set serves every GPU and network. The middle is what DiT-XL/2 reached on an H200
(``bench/results/nvidia-h200/2026-11-26_kernels`` and ``2026-11-26_gpu``) where that measured it, and published
trainings agree with it within 30 % (``tests/planning/test_published_runs.py``). ``--from``
replaces it by another measurement.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of a GPU's dense rate, and of its memory's bandwidth."""

    matmul: float
    """Of matrix products: 730 of 989 TFLOP/s measured in the blocks, 789 for the largest products."""
    convolution: float
    """Assumed."""
    attention: float
    """Of attention to more than 256 keys: 0.47 published for heads of 64 (Shah et al. 2024, arXiv:2407.08608)."""
    short_attention: float
    """To fewer keys: measured with 256 and heads of 72."""
    streaming: float
    """Of the bandwidth, by all other kernels of compiled blocks: what the step took beside products and attention."""
    eager: float
    """Of the bandwidth, by the same kernels of an eager pass: with it the published trainings agree."""
    copies: float
    """Of the bandwidth, by copies into another layout. Assumed (pytorch/pytorch#113560)."""
    counted: float
    """Of a copy's rate and of the issue slots, by counted kernels: with the middle each kernel of a DiT block is within
    20 % of its time on an H200."""
    update: float
    """Of the bandwidth, by norm, optimizer and averages: 70 bytes per parameter took 13.4 ms. A large copy has 0.89."""


FAST = Shares(
    matmul=0.80, convolution=0.65, attention=0.47, short_attention=0.33, streaming=0.65, eager=0.80, copies=0.42,
    counted=1.0, update=0.89,
)  # fmt: skip
MIDDLE = Shares(
    matmul=0.738, convolution=0.45, attention=0.33, short_attention=0.17, streaming=0.42, eager=0.50, copies=0.25,
    counted=0.94, update=0.74,
)  # fmt: skip
SLOW = Shares(
    matmul=0.50, convolution=0.30, attention=0.20, short_attention=0.11, streaming=0.30, eager=0.33, copies=0.125,
    counted=0.7, update=0.5,
)  # fmt: skip
COPY = 0.887
"""Share of the bandwidth that a large copy reaches: 4.256 of 4.8 TB/s (``nvidia-h200/2026-11-26_gpu``)."""
SUSTAINED = 1.045
"""Seconds of a long step per those of its kernels in a short one: 28 blocks took 395.2 ms forward and backward, 378.2
by the time of four blocks. The power limit is suspected; the record has neither clock nor power."""
LEVELS = {"high": FAST, "mid": MIDDLE, "low": SLOW}
"""By the height of the rate."""


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
