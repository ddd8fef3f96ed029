"""Attention of short sequences: DiT of 256 and of 64 tokens, heads of 80 channels, and lengths that fill no block."""

from functools import partial

import torch

from fastdiff_bench.cases.case import Case, Inputs, Outputs
from fastdiff_kernels.names import Backend
from fastdiff_kernels.short_attention import short_attention, short_attention_reference

# Heads, tokens and channels of a head.
SHAPES = {
    "DiT-XL/2": (16, 256, 72),
    "DiT-XL/4": (16, 64, 72),
    "DiT-B/2": (12, 256, 64),
    "ViT-H/16": (16, 196, 80),
    "text": (12, 77, 64),
}

_TOKENS_LARGE = 2**16
"""Of 256 samples of DiT/2 at 256 px."""


def _build(device: str, model: str, dtype: torch.dtype, samples: int) -> Inputs:
    heads, length, head_dim = SHAPES[model]
    shapes = {"qkv": (samples, length, 3, heads, head_dim), "bias": (3 * heads * head_dim,)}
    return {n: torch.randn(shape, device=device).to(dtype).requires_grad_() for n, shape in shapes.items()}


def _call(inputs: Inputs, backend: Backend) -> Outputs:
    return (short_attention if backend == "triton" else short_attention_reference)(inputs["qkv"], inputs["bias"])


def _case(model: str, dtype: torch.dtype) -> Case:
    heads, length, head_dim = SHAPES[model]
    build = partial(_build, model=model, dtype=dtype)
    return Case(
        op="short_attention",
        shape=f"{model}-{heads}x{length}x{head_dim}",
        backends=("triton", "reference"),
        dtype=dtype,
        build=partial(build, samples=4),
        build_large=partial(build, samples=_TOKENS_LARGE // length),
        call=_call,
        sums=("dbias",),
        arithmetic=str(dtype),
    )


CASES = [
    *(_case(model, torch.bfloat16) for model in SHAPES),
    *(_case("DiT-XL/2", dtype) for dtype in (torch.float32, torch.float16)),
]
