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
"""bf16 operations per second of a large cuBLAS product. Assumed: 68, 74 and 80 % of the 989e12 of NVIDIA's data sheet.
Smaller products lose to partial waves: ``budget.product_seconds``."""
FP8_FLOPS: dict[Level, float] = {"low": 1345e12, "mid": 1465e12, "high": 1583e12}
"""FP8 operations per second of a large product with one scale per operand. Assumed: the shares of bf16, of the
1979e12 of NVIDIA's data sheet. torchao's roofline, too, takes one share for both: 78 % on an H100
(``roofline_utils.py``)."""
ROWWISE_SHARE: dict[Level, float] = {"low": 0.9, "mid": 0.95, "high": 1.0}
"""Of that, with a scale per row. pytorch/pytorch#147971 reports 0.9 to 1 for most shapes, and less for some."""
CONVOLUTION_FLOPS: dict[Level, float] = {"low": 450e12, "mid": 550e12, "high": 650e12}
"""Of cuDNN's 3 x 3 convolutions in channels_last. Assumed: 0.67 to 0.82 of the rate of products."""
LONG_ATTENTION_FLOPS: dict[Level, float] = {"low": 330e12, "mid": 420e12, "high": 470e12}
"""Of attention, forward and backward together, at head dim 64 and 1k tokens or more (Shah et al. 2024,
arXiv:2407.08608, figures 5 and 6, on an H100 whose processors are those of an H200); low is assumed."""
SHORT_ATTENTION_FLOPS: dict[Level, float] = {"low": 150e12, "mid": 233e12, "high": 360e12}
"""At up to 256 tokens, counted with the head dim padded to a multiple of 32. Assumed: the same figures begin at 512."""
BANDWIDTH: dict[Level, float] = {"low": 3.6e12, "mid": 4.0e12, "high": 4.2e12}
"""Bytes per second of a streaming kernel; NVIDIA's data sheet has 4.8e12. Assumed: 75, 83 and 88 % of it."""
TRANSPOSING_BANDWIDTH: dict[Level, float] = {"low": 0.6e12, "mid": 1.2e12, "high": 2.0e12}
"""Of eager copies into another layout; pytorch/pytorch#113560 reports one at a ninth of a compiled copy. Assumed: an
eighth to a half."""
LAUNCH_SECONDS: dict[Level, float] = {"low": 3.6e-6, "mid": 2.8e-6, "high": 1.8e-6}
"""Of the device per tiny kernel of an optimizer step, with the part of the host's launches that it waits for.
Assumed."""
SYNCHRONISATION_SECONDS: dict[Level, float] = {"low": 2.0e-3, "mid": 1.25e-3, "high": 0.75e-3}
"""Idle device after the host has read a value, until launches run ahead again. Assumed."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Cost of everything that happens once per optimizer step: norm, update, averages, casts."""

    bytes_per_parameter: float
    launches_per_tensor: float
    launches: int
    synchronisations: int


FIRST = "zero1"
"""Engine of the table of items."""
ENGINES: dict[str, Engine] = {
    "DeepSpeed's own step": Engine(94, 15.9, 0, 2),
    FIRST: Engine(16 + 58.1 + 12, 0.0, 28, 1),
    "flat": Engine(4 + 40, 0.0, 23, 0),
    "flat, 8-bit moments": Engine(4 + 28.2, 0.0, 23, 0),
}
"""Bytes counted at the dispatcher, inputs and outputs of every operation, on one rank with bf16 gradients, clipping and
one average: first the backward pass's copies of gradients, then the optimizer step, then the average if it is not part
of the step. ``test_step_costs.py`` has limits for operations, reads and bytes of the steps; of the flat ones it counts
2 bytes more than the kernel moves.

DeepSpeed's own step is that of ZeRO-1 of release 0.19.8, which fastdiff shortens to ``zero1``. The flat engine is that
of ``ddp.json``.
"""
