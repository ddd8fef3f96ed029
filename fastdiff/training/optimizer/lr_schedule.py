"""Learning-rate schedules: the factor of the learning rate after each number of optimizer steps.

They are those of ``get_scheduler`` in diffusers and transformers, equal to the bit; to import either takes seconds.
"""

import math
from collections.abc import Callable
from functools import partial

from fastdiff.config.sections.optim import POLYNOMIAL_END, OptimConfig


def lr_factor(config: OptimConfig, steps: int) -> Callable[[int], float]:
    """Return the function from the number of applied optimizer steps to the factor of ``config.lr``.

    Args:
        config: schedule, warm-up and learning rate.
        steps: optimizer steps of the whole run.
    """
    decays: dict[str, Callable[[int, int], float]] = {
        "constant": _constant,
        "constant_with_warmup": _constant,
        "linear": _linear,
        "cosine": _cosine,
        "cosine_with_restarts": _cosine_with_restarts,
        "polynomial": partial(_polynomial, config.lr),
    }
    return partial(_factor, decays[config.schedule], config.warmup_steps, steps)


def _factor(decay: Callable[[int, int], float], warmup: int, steps: int, applied: int) -> float:
    """Rise linearly to 1 in ``warmup`` steps; from there ``decay`` has ``steps - warmup`` steps."""
    return applied / warmup if applied < warmup else decay(applied - warmup, steps - warmup)


def _constant(done: int, total: int) -> float:
    return 1.0


def _linear(done: int, total: int) -> float:
    return max(0.0, (total - done) / max(1, total))


def _cosine(done: int, total: int) -> float:
    """Half a period; it rises again after its end."""
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (done / max(1, total)))))


def _cosine_with_restarts(done: int, total: int) -> float:
    """One cycle: ``_cosine``, but 0 after its end."""
    progress = done / max(1, total)
    return 0.0 if progress >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def _polynomial(lr: float, done: int, total: int) -> float:
    """Fall linearly, with power 1, to the rate ``POLYNOMIAL_END``."""
    left = 1 - done / total if done < total else 0.0
    return ((lr - POLYNOMIAL_END) * left + POLYNOMIAL_END) / lr
