"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101): of torch, with 8-bit moments, and of bitsandbytes."""

import math
from dataclasses import dataclass
from typing import Literal

from fastdiff.config.optimizers.family import OptimizerFamily, StateTensor
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.errors import require

_LEAST_EPS = 2.0**-126
BLOCK = 256
"""``fastdiff_kernels.adamw8bit.BLOCK``, whose import needs torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConfig(OptimConfig):
    """AdamW and its learning rate."""

    name: Literal["adamw", "adamw8bit", "adamw8bit-bnb"] = "adamw"
    """adamw: torch, 8 bytes of state per parameter; adamw8bit: fastdiff's own, 2 bytes, with losses and checkpoints
    independent of the number of ranks and the ZeRO stage; adamw8bit-bnb: bitsandbytes, 2 bytes, requantised when these
    change; or an optimizer of an installed package."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moments."""
    eps: float = 1e-8
    """Epsilon, added to the square root of the second moment."""

    def _check_own(self) -> None:
        require(all(0 <= b < 1 for b in self.betas), f"--optim.betas {self.betas}: each from 0 to below 1")
        require(
            _LEAST_EPS <= self.eps < math.inf,
            f"--optim.eps {self.eps}: at least {_LEAST_EPS:.2g}, the smallest number of fp32: a weight without a "
            "gradient becomes NaN otherwise; 1e-8 is usual",
        )


ADAMW = OptimizerFamily(
    name="adamw",
    config=AdamWConfig,
    optimizer="torch.optim:AdamW",
    arguments={"fused": True},  # one pass over memory, without temporaries
    state=(StateTensor(name="exp_avg"), StateTensor(name="exp_avg_sq")),
    counts="tensor",
    flat_update="fastdiff.training.optimizer.adamw:AdamWUpdate",
    ordered_arguments={"fused": False},  # fused, a CPU rounds the last elements of a slice otherwise
    kernel="adamw",
    remedy="reinstall torch",
    smaller="adamw8bit",
    aliases=("adamw_torch", "adamw_torch_fused"),
    adamw_moments="fastdiff.export.adamw_state:of_torch",
    of_adam_size=True,
    continues_adamw=True,
)
ADAMW8BIT = OptimizerFamily(
    name="adamw8bit",
    config=AdamWConfig,
    optimizer="fastdiff_kernels.adamw8bit:AdamW8bit",
    ordered_arguments={},
    state=(
        StateTensor(name="exp_avg_codes", dtype="int8"),
        StateTensor(name="exp_avg_sq_codes", dtype="uint8"),
        StateTensor(name="exp_avg_scales", unit="block", block=BLOCK),
        StateTensor(name="exp_avg_sq_scales", unit="block", block=BLOCK),
    ),
    counts="int",
    create_state="fastdiff.training.optimizer.adamw8bit:create_state",
    flat_update="fastdiff.training.optimizer.adamw8bit:AdamW8bitUpdate",
    kernel="adamw8bit",
    kernel_in="every engine",
    without_compiler="fastdiff_kernels.adamw8bit.compiled:unavailable",
    library="fastdiff",
    aliases=("adamw_bnb_8bit", "adamw_8bit"),
    adamw_moments="fastdiff.export.adamw_state:of_8bit",
    of_adam_size=True,
)
ADAMW8BIT_BNB = OptimizerFamily(
    name="adamw8bit-bnb",
    config=AdamWConfig,
    optimizer="bitsandbytes.optim:AdamW8bit",
    state=(StateTensor(name="state1", dtype="uint8"), StateTensor(name="state2", dtype="uint8")),
    counts="int",
    sliced=False,  # its blocks cross the borders of parameters
    smallest=4096,
    create_state="fastdiff.training.optimizer.adamw8bit_bnb:create_state",
    flat_update=None,
    library="bitsandbytes",
    remedy="use --optim.name adamw8bit, or pip install 'bitsandbytes>=0.50,<0.51'",
    adamw_moments="fastdiff.export.adamw_state:of_bitsandbytes",
    of_adam_size=True,
)
