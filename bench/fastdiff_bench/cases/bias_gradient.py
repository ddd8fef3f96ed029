"""Ops that sum the gradient of a bias, behind the linear layers ``fc1`` and ``qkv`` of the DiT."""

from collections.abc import Callable
from functools import partial

import torch

from fastdiff_bench.cases.case import Case, Inputs, Outputs, elements
from fastdiff_kernels.bias_gradient import gelu, unpacked
from fastdiff_kernels.names import Backend

# Heads and channels of a head of DiT-S, -B, -L and -XL.
HEADS = {"S": (6, 64), "B": (12, 64), "L": (16, 64), "XL": (16, 72)}
TOKENS = 256
SAMPLES = 4
SAMPLES_LARGE = 64
_MLP_RATIO = 4

_OPERATIONS = {"gelu": (9, 19), "unpacked": (0, 1)}
"""Per element, forward and backward.

GELU: square 1, z 3, sigmoid 3, product 1, and 1 to double z. Its gradient: square 1, z 3, both sigmoids 6, slope 7,
product 1, sum 1.
"""


def _call(inputs: Inputs, backend: Backend, form: str) -> Outputs:
    return (gelu if form == "gelu" else unpacked)(inputs["u"], inputs["bias"], backend=backend)


def _inputs(device: str, form: str, letter: str, dtype: torch.dtype, samples: int) -> Inputs:
    heads, width = HEADS[letter]
    channels = (3, heads, width) if form == "unpacked" else (_MLP_RATIO * heads * width,)
    shapes = {"u": (samples, TOKENS, *channels), "bias": (torch.Size(channels).numel(),)}
    return {n: torch.randn(s, dtype=dtype, device=device).requires_grad_() for n, s in shapes.items()}


def _backward_bytes(form: str) -> Callable[[Inputs], int]:
    """Count the gradients read and written, and of GELU its input; the bias is not read."""
    passes = 3 if form == "gelu" else 2
    return lambda i: passes * int(i["u"].nbytes) + int(i["bias"].nbytes)


def _case(form: str, letter: str, dtype: torch.dtype) -> Case:
    build = partial(_inputs, form=form, letter=letter, dtype=dtype)
    forward, backward = _OPERATIONS[form]
    return Case(
        op="bias_gradient",
        shape=f"DiT-{letter}-{form}",
        dtype=dtype,
        build=partial(build, samples=SAMPLES),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=partial(_call, form=form),
        sums=("dbias",),
        # Unpacking writes nothing, and nothing reads the bias.
        forward_bytes=lambda i: 2 * int(i["u"].nbytes) if form == "gelu" else 0,
        backward_bytes=_backward_bytes(form),
        forward_operations=elements("u", forward),
        backward_operations=elements("u", backward),
    )


_FORMS = ("gelu", "unpacked")
CASES = [
    *(_case(form, letter, torch.bfloat16) for letter in HEADS for form in _FORMS),
    *(_case(form, "XL", dtype) for dtype in (torch.float32, torch.float16) for form in _FORMS),
]
