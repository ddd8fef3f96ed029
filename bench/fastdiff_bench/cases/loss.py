"""Loss of a prediction, and its gradient."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastdiff_bench.cases.case import Case, Inputs
from fastdiff_bench.cases.noising import BATCH, TIMESTEPS, noise_operations
from fastdiff_bench.cases.noising import latents as corruption
from fastdiff_kernels.loss import weighted_mse, weighted_mse_reference
from fastdiff_kernels.names import Backend
from fastdiff_kernels.noising import Streams

_SEED = 1234567


def _build(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], channels: int, pixels: bool, masked: bool
) -> Inputs:
    batch, _, height, width = shape
    mask = {"mask": (torch.rand(batch, height, width, device=device) < 0.5).half()} if masked else {}
    return (
        mask
        | corruption(device, dtype, shape, pixels)
        | {
            "prediction": torch.randn(batch, channels, height, width, device=device).to(dtype).requires_grad_(),
            "time": torch.arange(batch, device=device) % TIMESTEPS,
            "weights": torch.linspace(0.1, 1, TIMESTEPS, device=device),
        }
    )


def _call(inputs: Inputs, backend: Backend, **options: Any) -> Tensor:
    return weighted_mse(**inputs, seed=_SEED, backend=backend, **options)


def _exact(inputs: Inputs, **options: Any) -> Tensor:
    return weighted_mse_reference(**inputs, seed=_SEED, streams=Streams(), **options)


def _read(inputs: Inputs, clean: bool = True, posterior: bool = False, **_: Any) -> int:
    """Count the bytes that either pass reads: the compared prediction, a mask, latents unless noise is predicted."""
    latents: Tensor = inputs["latents"]
    compared: int = inputs["prediction"][:, : latents.shape[1] // (1 + posterior)].nbytes
    mask: int = inputs["mask"].nbytes if "mask" in inputs else 0
    return compared + latents.nbytes * clean + mask


def _backward_bytes(inputs: Inputs, **options: Any) -> int:
    written: int = inputs["prediction"].nbytes
    return _read(inputs, **options) + written


def _operations(inputs: Inputs, each: int, clean: bool = True, posterior: bool = False, **options: Any) -> int:
    """Count operations per element: the noise, the target 1 (with x0: 3), the difference 1, a mask 1, and ``each``.

    Both passes draw the noise; only then is the number of bytes minimal.
    """
    each += noise_operations(posterior=posterior, **options) + 1 + 2 * clean + 1 + ("mask" in inputs)
    return each * int(inputs["latents"].numel()) // (1 + posterior)


def _case(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    channels: int | None = None,
    pixels: bool = False,
    masked: bool = False,
    **options: Any,
) -> Case:
    build = partial(_build, dtype=dtype, channels=channels or shape[1], pixels=pixels, masked=masked)
    return Case(
        op="loss",
        shape=name,
        dtype=dtype,
        build=partial(build, shape=shape),
        build_large=partial(build, shape=(BATCH, *shape[1:])),
        call=partial(_call, **options),
        exact=partial(_exact, **options),
        forward_bytes=partial(_read, **options),
        backward_bytes=partial(_backward_bytes, **options),
        forward_operations=partial(_operations, each=2, **options),  # square, sum
        backward_operations=partial(_operations, each=1, **options),  # product
    )


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = [
    _case("sd-4x64x64-epsilon", BF16, (64, 4, 64, 64), clean=False),
    _case("sd-4x64x64-v-offset", BF16, (64, 4, 64, 64), offset=0.1),
    _case("sd-4x64x64-v-posterior", BF16, (64, 8, 64, 64), channels=4, posterior=True),
    _case("dit-4x32x32-epsilon-learned-variance", BF16, (64, 4, 32, 32), channels=8, clean=False),
    _case("sdxl-4x128x128-v", FP16, (16, 4, 128, 128)),
    _case("sd3-16x64x64-v", FP32, (16, 16, 64, 64)),
    _case("adm-3x64x64-pixels-v", BF16, (64, 3, 64, 64), pixels=True),
    _case("sd-4x64x64-v-masked", BF16, (64, 4, 64, 64), masked=True),
]
