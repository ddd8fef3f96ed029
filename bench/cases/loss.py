"""Loss of a prediction, and its gradient."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench.cases.case import Case, Inputs
from bench.cases.noising import TIMESTEPS
from bench.cases.noising import latents as corruption
from fastdiff_kernels.dispatch import Backend
from fastdiff_kernels.loss import weighted_mse


def _build(device: str, dtype: torch.dtype, shape: tuple[int, ...], channels: int) -> Inputs:
    batch, _, height, width = shape
    return corruption(device, dtype, shape) | {
        "prediction": torch.randn(batch, channels, height, width, device=device).to(dtype).requires_grad_(),
        "time": torch.arange(batch, device=device),
        "weights": torch.linspace(0.1, 1, TIMESTEPS, device=device),
    }


def _call(inputs: Inputs, backend: Backend, **options: float) -> Tensor:
    return weighted_mse(**inputs, seed=1234567, backend=backend, **options)


def _case(name: str, dtype: torch.dtype, shape: tuple[int, ...], channels: int | None = None, **options: float) -> Case:
    return Case(
        op="loss",
        shape=name,
        dtype=dtype,
        build=partial(_build, dtype=dtype, shape=shape, channels=channels or shape[1]),
        call=partial(_call, **options),
    )


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = [
    _case("sd-4x64x64-epsilon", BF16, (64, 4, 64, 64), clean=False),
    _case("sd-4x64x64-v-offset", BF16, (64, 4, 64, 64), offset=0.1),
    _case("sd-4x64x64-v-posterior", BF16, (64, 8, 64, 64), channels=4, posterior=True),
    _case("dit-4x32x32-epsilon-learned-variance", BF16, (64, 4, 32, 32), channels=8, clean=False),
    _case("sdxl-4x128x128-v", FP16, (16, 4, 128, 128)),
    _case("sd3-16x64x64-v", FP32, (16, 16, 64, 64)),
]
