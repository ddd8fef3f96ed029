"""Dropout at the shapes of IDDPM's UNets (CIFAR-10 and ImageNet at 64 px), with a smaller batch."""

from functools import partial

import torch
from torch import Tensor

from fastdiff_bench.cases.case import Case, Inputs, elements
from fastdiff_bench.cases.philox import WORD
from fastdiff_kernels.dropout import dropout
from fastdiff_kernels.names import Backend

_BATCH = 128
_SEED, _STREAM, _SHARE = 1234567, 11, 0.3
_OPERATIONS = WORD + 3
"""Operations per element of either pass: the word, a uniform number 1, its comparison 1, the product 1."""


def _build(device: str, dtype: torch.dtype, shape: tuple[int, int, int], samples: int) -> Inputs:
    _, channels, side = shape
    image = torch.randn(samples, channels, side, side, device=device, dtype=dtype)
    return {
        "x": image.to(memory_format=torch.channels_last).requires_grad_(),
        "position": torch.arange(samples, device=device),
        "stream": torch.tensor(_STREAM, device=device),
    }


def _call(inputs: Inputs, backend: Backend) -> Tensor:
    return dropout(**inputs, p=_SHARE, seed=_SEED, backend=backend)


def _backward_bytes(inputs: Inputs) -> int:
    """Count one gradient read and one written; the input is not needed."""
    return 2 * int(inputs["x"].nbytes)


def _case(shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> Case:
    samples, channels, side = shape
    build = partial(_build, dtype=dtype, shape=shape)
    return Case(
        op="dropout",
        shape=f"{channels}x{side}x{side}",
        dtype=dtype,
        build=partial(build, samples=samples),
        build_large=partial(build, samples=_BATCH),
        call=_call,
        backward_bytes=_backward_bytes,
        forward_operations=elements("x", _OPERATIONS),
        backward_operations=elements("x", _OPERATIONS),
    )


CASES = [
    _case((2, 128, 64)),
    _case((4, 256, 16)),
    _case((64, 256, 4)),
    _case((4, 256, 16), torch.float32),
    _case((4, 256, 16), torch.float16),
]
