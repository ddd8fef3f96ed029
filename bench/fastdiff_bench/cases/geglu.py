"""GEGLU of the transformers in the UNet of Stable Diffusion 2 at 512 px."""

from functools import partial

import torch

from fastdiff_bench.cases.case import Case, Inputs, Outputs, elements
from fastdiff_kernels.geglu import geglu
from fastdiff_kernels.names import Backend

# Tokens and channels of a level; the layer before GEGLU has eight times the channels.
LEVELS = ((4096, 320), (1024, 640), (256, 1280), (64, 1280))
SAMPLES_LARGE = 16

_FORWARD, _BACKWARD = 12, 16
"""Operations per element of u, two of which make one of the result.

Forward: distribution function 21, two products. Backward: that and the density 21, dv 2, dg 4, half of two sums.
"""


def _call(inputs: Inputs, backend: Backend) -> Outputs:
    return geglu(inputs["u"], inputs["bias"], backend=backend)


def _inputs(device: str, tokens: int, channels: int, dtype: torch.dtype, samples: int) -> Inputs:
    shapes = {"u": (samples, tokens, 8 * channels), "bias": (8 * channels,)}
    return {n: torch.randn(s, dtype=dtype, device=device).requires_grad_() for n, s in shapes.items()}


def _case(tokens: int, channels: int, dtype: torch.dtype) -> Case:
    build = partial(_inputs, tokens=tokens, channels=channels, dtype=dtype)
    return Case(
        op="geglu",
        chosen_as="group_norm",
        shape=f"SD2-{tokens}x{channels}",
        dtype=dtype,
        build=partial(build, samples=1),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=_call,
        sums=("dbias",),
        # Nothing reads the bias. Backward: dy, half of u, and u read, du and the gradient of the bias written.
        forward_bytes=lambda i: 3 * int(i["u"].nbytes) // 2,
        backward_bytes=lambda i: 5 * int(i["u"].nbytes) // 2 + int(i["bias"].nbytes),
        forward_operations=elements("u", _FORWARD),
        backward_operations=elements("u", _BACKWARD),
    )


CASES = [
    *(_case(tokens, channels, torch.bfloat16) for tokens, channels in LEVELS),
    *(_case(*LEVELS[1], dtype) for dtype in (torch.float32, torch.float16)),
]
