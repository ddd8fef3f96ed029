"""Exponential moving averages of the weights, on this rank's fp32 fragments.

No gather and 1/W of the memory: each rank averages the fragments that its optimizer updates (``Flat``), or, under
ZeRO-0, the parameters that it owns. Averaging ``module.parameters()`` under ZeRO-3 would average empty tensors.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastdiff.checkpoint.power_function import constant_name, exponent, power_name, share
from fastdiff.parallel.fragments import Flat


class Ema:
    """``average <- average + share * (weights - average)`` after every applied step, for several shares at once.

    Args:
        flats: this rank's flat fp32 weights; the averages start as copies of them.
        rates: decay rates in (0, 1) of averages of constant rate, whose share is 1 - rate; may be empty.
        power_stds: relative stds of power-function averages (``checkpoint.power_function``); may be empty.
        warmup: limit the rate of step n, counted from 0, to (1 + n) / (10 + n), and that of the first step to 0, as in
            diffusers' ``EMAModel``, so that the initial weights do not dominate the average of a short run.
            Power-function averages contain no part of the initial weights.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        rates: Sequence[float] = (),
        *,
        power_stds: Sequence[float] = (),
        warmup: bool = False,
    ) -> None:
        self.rates, self.power_stds = tuple(rates), tuple(power_stds)
        self._masters = [flat.master for flat in flats if flat.owned]
        self._shares: dict[str, Callable[[int], float]] = {
            **{constant_name(rate): _constant(rate, warmup=warmup) for rate in rates},
            **{power_name(std): _power(std) for std in power_stds},
        }
        self.averages: dict[str, list[Tensor | None]] = {
            name: [flat.master.clone() if flat.owned else None for flat in flats] for name in self._shares
        }
        """By name, those of constant rate first: one flat tensor per ``Flat``, None where another rank owns it."""

        self.in_the_update = False
        """Whether the engine moves the averages in its own pass over the weights (``Engine.attach``)."""

    def shares(self, applied: int) -> list[float]:
        """Return the share of each average in the step after which ``applied`` steps are applied, in their order."""
        return [share_of(applied) for share_of in self._shares.values()]

    @torch.no_grad()
    def update(self, applied: int) -> None:
        """Move every average one step towards the weights, after ``applied`` applied steps, the last one included.

        Nothing is left to do if the engine has moved them.
        """
        if self.in_the_update:
            return
        for averages, part in zip(self.averages.values(), self.shares(applied), strict=True):
            owned = [average for average in averages if average is not None]
            if owned:
                torch._foreach_lerp_(owned, self._masters, part)


def _constant(rate: float, *, warmup: bool) -> Callable[[int], float]:
    def part(applied: int) -> float:
        n = applied - 1
        bound = 1.0 if not warmup else (1 + n) / (10 + n) if n > 0 else 0.0
        return 1.0 - min(rate, bound)

    return part


def _power(std: float) -> Callable[[int], float]:
    gamma = exponent(std)
    return lambda applied: share(gamma, applied)
