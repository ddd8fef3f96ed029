"""Assumed rates of an H200, of its libraries and of the optimizer step, at three levels: none is measured by us.

The budget multiplies counted operations, bytes and launches by them. Replace an assumption by a measurement as soon as
there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Level = Literal["low", "mid", "high"]
LEVELS: tuple[Level, ...] = get_args(Level)

GEMM_FLOPS: dict[Level, float] = {"low": 670e12, "mid": 730e12, "high": 790e12}
"""bf16 operations per second of a large cuBLAS product; short runs of 8192 cubed on H200s are reported at 769 to 798
TFLOP/s, lower under sustained power limits. Smaller products lose to partial waves: ``budget.product_seconds``."""
CONVOLUTION_FLOPS: dict[Level, float] = {"low": 450e12, "mid": 550e12, "high": 650e12}
"""Of cuDNN's 3 x 3 convolutions in channels_last; an estimate from 0.65 to 0.8 of the rate of products."""
LONG_ATTENTION_FLOPS: dict[Level, float] = {"low": 330e12, "mid": 420e12, "high": 470e12}
"""Of attention, forward and backward together, at head dim 64 and 1k tokens or more (Shah et al. 2024,
arXiv:2407.08608, figures 5 and 6)."""
SHORT_ATTENTION_FLOPS: dict[Level, float] = {"low": 150e12, "mid": 233e12, "high": 360e12}
"""At up to 256 tokens, counted with the head dim padded to a multiple of 32; an extrapolation of the same figures."""
BANDWIDTH: dict[Level, float] = {"low": 3.6e12, "mid": 4.0e12, "high": 4.2e12}
"""Bytes per second of a streaming kernel; the data sheet has 4.8e12, and copies reach 75 to 88 % of it."""
TRANSPOSING_BANDWIDTH: dict[Level, float] = {"low": 0.6e12, "mid": 1.2e12, "high": 2.0e12}
"""Of eager copies into another layout; pytorch/pytorch#113560 reports one at a ninth of a compiled copy."""
LAUNCH_SECONDS: dict[Level, float] = {"low": 3.6e-6, "mid": 2.8e-6, "high": 1.8e-6}
"""Of the device per tiny kernel of an optimizer step, with the part of the host's launches that it waits for."""
SYNCHRONISATION_SECONDS: dict[Level, float] = {"low": 2.0e-3, "mid": 1.25e-3, "high": 0.75e-3}
"""Idle device after the host has read a value, until launches run ahead again."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Cost of everything that happens once per optimizer step: norm, update, averages, casts."""

    bytes_per_parameter: float
    launches_per_tensor: float
    launches: int
    synchronisations: int


ENGINES: dict[str, Engine] = {
    "zero1": Engine(94, 15.9, 0, 2),
    "zero1, one norm": Engine(74, 0.0, 32, 1),
    "flat": Engine(38, 0.0, 3, 0),
    "flat, 8-bit moments": Engine(26, 0.0, 3, 0),
}
"""Counted at the dispatcher, inputs and outputs of every operation, on one rank with bf16 gradients and one average:
DeepSpeed 0.19.8's ZeRO-1 as released; with one fused norm and without the scan for overflow; and the least, with
gradients in one flat buffer, a norm, and one kernel for update, average and bf16 copy."""
