"""Noising of cached latents."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastdiff_bench.cases.case import Case, Inputs
from fastdiff_bench.cases.philox import NORMAL
from fastdiff_kernels.names import Backend
from fastdiff_kernels.noising import Streams, corrupt, corrupt_reference

TIMESTEPS = 1000
BATCH = 1024
_SEED = 1234567


def latents(device: str, dtype: torch.dtype, shape: tuple[int, ...], pixels: bool = False) -> Inputs:
    """Return the arguments that noising and the loss share: a v-prediction table of a linear signal-to-noise ratio.

    With ``pixels`` the latents are uint8.
    """
    levels = partial(torch.randint, 256, shape, dtype=torch.uint8, device=device)
    angle = torch.linspace(0.01, 1.56, TIMESTEPS, device=device)
    alpha, sigma = angle.cos(), angle.sin()
    return {
        "latents": levels() if pixels else torch.randn(shape, device=device).to(dtype),
        "position": torch.arange(shape[0], device=device),
        "table": torch.stack([alpha, sigma, -sigma, alpha], 1),
    }


def _call(inputs: Inputs, backend: Backend, noisy: torch.dtype, **options: Any) -> Sequence[Tensor]:
    return corrupt(**inputs, seed=_SEED, dtype=noisy, backend=backend, **options)


def _exact(inputs: Inputs, **options: Any) -> Sequence[Tensor]:
    return corrupt_reference(**inputs, seed=_SEED, streams=Streams(), **options)


def noise_operations(offset: float = 0.0, posterior: bool = False, **_: Any) -> int:
    """Count operations per element: the noise, its offset, and a sample of the posterior."""
    return NORMAL + bool(offset) + (NORMAL + 2) * posterior


def _operations(inputs: Inputs, posterior: bool = False, perturbation: float = 0.0, **options: Any) -> int:
    """Count the operations: the noise, its perturbation, and the mixture 3."""
    each = noise_operations(posterior=posterior, **options) + (NORMAL + 2) * bool(perturbation) + 3
    return each * int(inputs["latents"].numel()) // (1 + posterior)


def _case(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    noisy: torch.dtype | None = None,
    pixels: bool = False,
    **options: Any,
) -> Case:
    return Case(
        op="noising",
        shape=name,
        dtype=dtype,
        build=partial(latents, dtype=dtype, shape=shape, pixels=pixels),
        build_large=partial(latents, dtype=dtype, shape=(BATCH, *shape[1:]), pixels=pixels),
        call=partial(_call, noisy=noisy or dtype, **options),
        exact=partial(_exact, **options),
        forward_operations=partial(_operations, **options),
    )


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = [
    _case("sd-4x64x64", BF16, (64, 4, 64, 64)),
    _case("sd-4x64x64-offset", BF16, (64, 4, 64, 64), offset=0.1, perturbation=0.1),
    _case("sd-4x64x64-posterior", BF16, (64, 8, 64, 64), posterior=True),
    _case("dit-4x32x32-fp32-out", BF16, (64, 4, 32, 32), noisy=FP32),
    _case("sdxl-4x128x128", FP16, (16, 4, 128, 128)),
    _case("sd3-16x64x64", FP32, (16, 16, 64, 64)),
    _case("adm-3x64x64-pixels", BF16, (64, 3, 64, 64), pixels=True),
]
