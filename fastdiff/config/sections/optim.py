"""Optimizer and learning rate of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fastdiff.errors import require

_LEAST_EPS = 2.0**-126
POLYNOMIAL_END = 1e-7
"""Learning rate at the end of --optim.schedule polynomial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer and learning rate."""

    name: Literal["adamw", "adamw8bit", "adamw8bit-bnb"] = "adamw"
    """adamw: torch, 8 bytes of state per parameter; adamw8bit: fastdiff's own, 2 bytes, with losses and checkpoints
    independent of the number of ranks and the ZeRO stage; adamw8bit-bnb: bitsandbytes, 2 bytes, requantised when these
    change."""
    lr: float = 1e-4
    """Learning rate after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: float = 1e-8
    """Epsilon, added to the square root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip: float = 1.0
    """Maximum gradient norm over all parameters; 0: no clipping."""
    schedule: Literal["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"] = (
        "constant"
    )
    """Learning-rate schedule of diffusers.optimization.get_scheduler, counted in optimizer steps."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""

    def __post_init__(self) -> None:
        require(0 < self.lr < math.inf, f"--optim.lr {self.lr}: above 0")
        require(all(0 <= b < 1 for b in self.betas), f"--optim.betas {self.betas}: each from 0 to below 1")
        for name in ("weight_decay", "clip", "warmup_steps"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"--optim.{name} {value}: 0 or above")
        require(
            _LEAST_EPS <= self.eps < math.inf,
            f"--optim.eps {self.eps}: at least {_LEAST_EPS:.2g}, the smallest number of fp32: a weight without a "
            "gradient becomes NaN otherwise; 1e-8 is usual",
        )
        require(
            self.lr * self.weight_decay < 1,
            f"--optim.weight_decay {self.weight_decay} with --optim.lr {self.lr}: their product is below 1, because a "
            "step multiplies the weights by 1 - lr * weight_decay",
        )
        require(
            self.warmup_steps == 0 or self.schedule != "constant",
            "--optim.warmup_steps has no effect with --optim.schedule constant; "
            "use --optim.schedule constant_with_warmup",
        )
        require(
            self.schedule != "polynomial" or self.lr > POLYNOMIAL_END,
            f"--optim.lr {self.lr} with --optim.schedule polynomial: above {POLYNOMIAL_END}, at which it ends",
        )
