"""Random numbers alone, as many as a batch of latents has."""

import math
from functools import partial

import torch
from torch import Tensor

from fastdiff_bench.cases.case import Case, Inputs
from fastdiff_kernels import philox
from fastdiff_kernels.names import Backend

_COUNT = 4 * 64 * 64

WORD = 15
"""Operations per random word: ten rounds of two products and four exclusive ors give four words; keys are shared."""
NORMAL = WORD + 5
"""Operations per normal number: two products and a maximum; logarithm, factor, root, cosine, sine, two products."""


def _build(device: str, batch: int = 64) -> Inputs:
    return {"position": torch.arange(batch, device=device)}


def _call(inputs: Inputs, backend: Backend) -> Tensor:
    return philox.normal(1, 1, inputs["position"], _COUNT, backend)


def _exact(inputs: Inputs) -> Tensor:
    uniform = philox.uniform(1, 1, inputs["position"], _COUNT, "reference").double()
    radius = (-2 * uniform[:, 0::2].clamp(min=torch.tensor(1e-7).item()).log()).sqrt()
    angle = 2 * math.pi * uniform[:, 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(1)


CASES = [
    Case(
        op="philox",
        shape="normal-4x64x64",
        dtype=torch.float32,
        build=_build,
        build_large=partial(_build, batch=1024),
        call=_call,
        exact=_exact,
        forward_operations=lambda inputs: NORMAL * _COUNT * int(inputs["position"].numel()),
    )
]
