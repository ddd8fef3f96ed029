"""The record of the toy optimizer, and its hyper-parameters; without torch."""

from dataclasses import dataclass
from typing import Literal

from fastdiff.config.optimizers.family import OptimizerFamily, StateTensor
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.errors import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig(OptimConfig):
    """Momentum, scaled by a running norm of each matrix."""

    name: Literal["toy"] = "toy"
    """Name of the optimizer; not to be changed."""
    lr: float = 1e-2
    """Learning rate after the warm-up."""
    momentum: float = 0.9
    """Decay rate of the moment and of the norms."""

    def _check_own(self) -> None:
        require(0 <= self.momentum < 1, f"--optim.momentum {self.momentum}: from 0 to below 1")


TOY = OptimizerFamily(
    name="toy",
    config=ToyConfig,
    optimizer="toy_optimizer.optimizer:Toy",
    state=(StateTensor(name="moment"), StateTensor(name="norm", unit="matrix")),
    counts="int",
    whole_matrices=True,
    library="toy-optimizer",
)
