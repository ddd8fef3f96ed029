"""Exponential moving averages of the weights, on this rank's fp32 fragments.

No gather and 1/W of the memory: each rank averages what its optimizer updates (``Flat``), or, under ZeRO-0, the
parameters it owns. Averaging ``module.parameters()`` under ZeRO-3 would average empty tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.fragments import Flat


class Ema:
    """``average <- rate * average + (1 - rate) * weights`` after every applied step, one average per rate.

    Args:
        flats: this rank's flat fp32 weights; the averages start as copies of them.
        rates: decay rates in (0, 1); may be empty.
        warmup: let the rate of step n, counted from 0, be at most (1 + n) / (10 + n), and that of the first one 0, as
            diffusers' ``EMAModel`` does: so that the average of a short run is not mostly what it started from.
    """

    def __init__(self, flats: Sequence[Flat], rates: Sequence[float], *, warmup: bool = False) -> None:
        self.rates = tuple(rates)
        self._warmup = warmup
        self._masters = [flat.master for flat in flats if flat.owned]
        self.averages: dict[float, list[Tensor | None]] = {
            rate: [flat.master.clone() if flat.owned else None for flat in flats] for rate in rates
        }
        """One flat tensor per ``Flat``, None where another rank owns it."""

    def update(self, applied: int) -> None:
        """Move every average one step towards the weights, after ``applied`` applied steps, the last one included."""
        n = applied - 1
        bound = 1.0 if not self._warmup else (1 + n) / (10 + n) if n > 0 else 0.0
        for rate, averages in self.averages.items():
            owned = [average for average in averages if average is not None]
            if owned:
                torch._foreach_lerp_(owned, self._masters, 1.0 - min(rate, bound))
