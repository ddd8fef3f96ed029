"""Best learning rate of a sweep, and the rates that it has to try beyond its ends."""

import math
from collections.abc import Mapping

BEYOND = 3
"""Rates that a sweep adds at most."""
_FACTOR = 2.0
"""Between the end of a sweep and the next rate."""


def beyond(losses: Mapping[float, float]) -> set[float]:
    """Return the next learning rate beyond the end that is best; empty: the best one lies inside.

    Args:
        losses: by learning rate; infinite: the run failed.
    """
    lowest, highest = min(losses), max(losses)
    if best_rate(losses) is not None:
        return set()
    return {highest * _FACTOR if losses[highest] < losses[lowest] else lowest / _FACTOR}


def best_rate(losses: Mapping[float, float]) -> float | None:
    """Return the learning rate of the lowest loss: the lowest point of a parabola through it and its neighbours.

    Args:
        losses: by learning rate, at equal ratios; infinite: the run failed.

    Returns:
        Between the rates, by a parabola over their logarithms; None: the lowest loss is at an end.
    """
    rates = sorted(losses)
    values = [losses[rate] for rate in rates]
    best = min(range(len(rates)), key=values.__getitem__)
    if best in (0, len(rates) - 1):
        return None
    low, middle, high = values[best - 1 : best + 2]
    if math.isinf(low) or math.isinf(high):
        return rates[best]
    bend = low - 2 * middle + high
    shift = (low - high) / (2 * bend) if bend else 0.0  # in steps of the sweep
    return rates[best] * math.exp(shift * math.log(rates[best + 1] / rates[best]))
