"""Best learning rate of a sweep: the lowest point of a parabola through the lowest loss and its neighbours."""

import math
from collections.abc import Mapping


def best_rate(losses: Mapping[float, float]) -> float | None:
    """Return the learning rate of the lowest loss.

    Args:
        losses: by learning rate, at equal ratios; one that is not finite counts as the worst.

    Returns:
        Between the rates, by a parabola over their logarithms; None: the lowest loss is at an end.
    """
    rates = sorted(losses)
    finite = [losses[rate] if math.isfinite(losses[rate]) else math.inf for rate in rates]
    best = min(range(len(rates)), key=finite.__getitem__)
    if best in (0, len(rates) - 1):
        return None
    low, middle, high = finite[best - 1 : best + 2]
    if math.isinf(low) or math.isinf(high):
        return rates[best]
    bend = low - 2 * middle + high
    shift = (low - high) / (2 * bend) if bend else 0.0  # in steps of the sweep
    return rates[best] * math.exp(shift * math.log(rates[best + 1] / rates[best]))
