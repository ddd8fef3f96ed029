"""Floating-point operations of the models, and what the devices can do.

One multiply-add counts as two operations; a backward pass costs twice a forward pass. (The "119 Gflops" that the
DiT paper prints for XL/2 are multiply-adds.)
"""

from __future__ import annotations

from fastdiff.config import DiTConfig

_PEAK_BF16 = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
}
"""Dense bf16 operations per second, from NVIDIA's data sheets; the longest name that fits counts."""


def forward_flops(config: DiTConfig) -> float:
    """Return the operations of one forward pass on one sample (matrix products only)."""
    tokens = (config.size // config.patch) ** 2
    width, patch = config.hidden, config.channels * config.patch**2
    out = patch * (2 if config.learn_sigma else 1)
    per_token = 4 * width**2 + 2 * config.mlp_ratio * width**2 + 2 * tokens * width
    per_sample = 6 * width**2  # adaLN of a block
    embedders = tokens * width * (patch + out) + 256 * width + width**2 + 2 * width**2
    return 2.0 * (config.depth * (tokens * per_token + per_sample) + embedders)


def training_flops(config: DiTConfig) -> float:
    """Return the operations of a forward and a backward pass on one sample, without recomputation."""
    return 3.0 * forward_flops(config)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in operations per second; None if the device is not listed."""
    fitting = [name for name in _PEAK_BF16 if name in device_name]
    return _PEAK_BF16[max(fitting, key=len)] if fitting else None
