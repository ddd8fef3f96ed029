"""Optimizer and learning rate of a run: the fields that every optimizer has."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from fastdiff.errors import require

POLYNOMIAL_END = 1e-7
"""Learning rate at the end of --optim.schedule polynomial."""
OF_RUN = ("clip", "schedule", "warmup_steps")
"""Fields that are no hyper-parameters of the optimizer; a run keeps them when its optimizer changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer and learning rate.

    The configuration of an optimizer is a frozen dataclass with ``kw_only`` and ``slots`` that derives from this class.
    It redefines ``name`` (``Literal["lion"] = "lion"``) and adds its own hyper-parameters, each with a default and its
    help text below. They become flags (``--optim.momentum``) and arguments of the optimizer's class.
    """

    name: str
    """Name of the optimizer."""
    lr: float = 1e-4
    """Learning rate after the warm-up."""
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
        for name in ("weight_decay", "clip", "warmup_steps"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"--optim.{name} {value}: 0 or above")
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
        self._check_own()

    def _check_own(self) -> None:
        """Refuse wrong values of the optimizer's own hyper-parameters, by ``errors.require``."""

    def hyper_parameters(self) -> dict[str, Any]:
        """Return the arguments of the optimizer's class: ``lr``, ``weight_decay`` and its own fields."""
        names = [field.name for field in fields(self) if field.name not in ("name", *OF_RUN)]
        return {name: getattr(self, name) for name in names}
