"""GELU behind the layer ``fc1`` of the DiT."""

from functools import partial

import torch

from fastdiff_bench.cases.case import Case, Inputs, Outputs, elements
from fastdiff_kernels.gelu import gelu
from fastdiff_kernels.names import Backend

# Width of the MLP of DiT-S, -B, -L and -XL.
WIDTHS = {"S": 1536, "B": 3072, "L": 4096, "XL": 4608}
TOKENS = 256
SAMPLES = 4
SAMPLES_LARGE = 64

_FORWARD, _BACKWARD = 8, 17
"""Operations per element.

Forward: square 1, z 3, sigmoid 3, product 1. Backward: square 1, z 3, both sigmoids 5, slope 6, product 1, sum 1.
"""


def _call(inputs: Inputs, backend: Backend) -> Outputs:
    return gelu(inputs["u"], inputs["bias"], backend=backend)


def _inputs(device: str, letter: str, dtype: torch.dtype, samples: int) -> Inputs:
    width = WIDTHS[letter]
    shapes = {"u": (samples, TOKENS, width), "bias": (width,)}
    return {n: torch.randn(s, dtype=dtype, device=device).requires_grad_() for n, s in shapes.items()}


def _case(letter: str, dtype: torch.dtype) -> Case:
    build = partial(_inputs, letter=letter, dtype=dtype)
    return Case(
        op="gelu",
        chosen_as="adaln",
        shape=f"DiT-{letter}",
        dtype=dtype,
        build=partial(build, samples=SAMPLES),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=_call,
        sums=("dbias",),
        # Nothing reads the bias. Backward: dy and u read, du and the gradient of the bias written.
        forward_bytes=lambda i: 2 * int(i["u"].nbytes),
        backward_bytes=lambda i: 3 * int(i["u"].nbytes) + int(i["bias"].nbytes),
        forward_operations=elements("u", _FORWARD),
        backward_operations=elements("u", _BACKWARD),
    )


CASES = [
    *(_case(letter, torch.bfloat16) for letter in WIDTHS),
    *(_case("XL", dtype) for dtype in (torch.float32, torch.float16)),
]
