"""Published scaling of data-parallel training, beside which the model is tested.

Every row is a measurement by others. A number that its source does not state is derived from what it states; the
comment says how.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """Throughput per GPU on many GPUs, relative to that on fewer."""

    source: str
    """Address."""
    what: str
    stage: int
    """ZeRO stage, or that to which FSDP corresponds."""
    parameters: int
    tensors: int
    step_seconds: float
    """On the fewer GPUs."""
    fewer: int
    more: int
    efficiency: float
    """Measured throughput per GPU on the more GPUs, divided by that on the fewer."""


_TITAN = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_LLAMA = (8_030_261_248, 291)
_TOKENS = 2 * 8192
"""Per GPU and step: local batch 2, sequences of 8,192 tokens, the default of that configuration."""

PUBLISHED = (
    Published(_TITAN, "Llama 3.1 8B, FSDP", 3, *_LLAMA, _TOKENS / 5762, 8, 128, 5605 / 5762),
    Published(_TITAN, "Llama 3.1 8B, FSDP, compiled", 3, *_LLAMA, _TOKENS / 6667, 8, 128, 6514 / 6667),
    Published(_TITAN, "Llama 3.1 8B, FSDP, compiled, float8", 3, *_LLAMA, _TOKENS / 8532, 8, 128, 8380 / 8532),
)  # fmt: skip

DDP_BEATS_ZERO = ("https://github.com/TensorAuto/OpenTau/issues/177", {0: 83.1 / 8, 1: 29.5 / 8, 2: 28.7 / 8}, 10.4)
"""A policy of about 3.4 billion parameters on 8 A100: samples per second and GPU by stage, and on a single GPU."""
