"""The split into queries, keys and values that sums the gradient of a bias, behind the layer ``qkv`` of the DiT."""

from functools import partial

import torch

from fastdiff_bench.cases.case import Case, Inputs, Outputs, elements
from fastdiff_kernels.bias_gradient import unpacked
from fastdiff_kernels.names import Backend

# Heads and channels of a head of DiT-S, -B, -L and -XL.
HEADS = {"S": (6, 64), "B": (12, 64), "L": (16, 64), "XL": (16, 72)}
TOKENS = 256
SAMPLES = 4
SAMPLES_LARGE = 64


def _call(inputs: Inputs, backend: Backend) -> Outputs:
    return unpacked(inputs["u"], inputs["bias"], backend=backend)


def _inputs(device: str, letter: str, dtype: torch.dtype, samples: int) -> Inputs:
    channels = (3, *HEADS[letter])
    shapes = {"u": (samples, TOKENS, *channels), "bias": (torch.Size(channels).numel(),)}
    return {n: torch.randn(s, dtype=dtype, device=device).requires_grad_() for n, s in shapes.items()}


def _case(letter: str, dtype: torch.dtype) -> Case:
    build = partial(_inputs, letter=letter, dtype=dtype)
    return Case(
        op="bias_gradient",
        chosen_as="adaln",
        shape=f"DiT-{letter}-unpacked",
        dtype=dtype,
        build=partial(build, samples=SAMPLES),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=_call,
        sums=("dbias",),
        # Unpacking writes nothing, and nothing reads the bias.
        forward_bytes=lambda i: 0,
        backward_bytes=lambda i: 2 * int(i["u"].nbytes) + int(i["bias"].nbytes),
        forward_operations=elements("u", 0),
        backward_operations=elements("u", 1),
    )


CASES = [
    *(_case(letter, torch.bfloat16) for letter in HEADS),
    *(_case("XL", dtype) for dtype in (torch.float32, torch.float16)),
]
