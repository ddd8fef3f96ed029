"""adaLN with the tensor layout of the DiT: shift, scale and gate are chunks of one tensor."""

from collections.abc import Callable

import torch

from fastdiff_bench.cases.case import Case, Inputs, Outputs, elements
from fastdiff_kernels.adaln import gated_modulated_norm, modulated_norm, residual_modulated_norm
from fastdiff_kernels.names import Backend

# Channels of DiT-S, -B, -L and -XL.
WIDTHS = {"S": 384, "B": 768, "L": 1024, "XL": 1152}
TOKENS = 256
SAMPLES = 4
SAMPLES_LARGE = 64


def _norm(inputs: Inputs, backend: Backend) -> Outputs:
    shift, scale, *_ = inputs["modulations"].chunk(6, dim=1)
    return modulated_norm(inputs["x"], shift, scale, backend=backend)


def _residual(inputs: Inputs, backend: Backend) -> Outputs:
    shift, scale, *_ = inputs["modulations"].chunk(6, dim=1)
    return residual_modulated_norm(inputs["x"], shift, scale, backend=backend)


def _gated(inputs: Inputs, backend: Backend) -> Outputs:
    shift, scale, gate, *_ = inputs["modulations"].chunk(6, dim=1)
    return gated_modulated_norm(inputs["x"], inputs["branch"], gate, shift, scale, backend=backend)


_CALLS = {"norm": _norm, "residual": _residual, "gated": _gated}

_FORWARD = {"norm": 7, "residual": 7, "gated": 9}
"""Operations per element: mean 1, centred 1, variance 2, normed 1, modulated 2; a gated branch 2."""
_BACKWARD = {"norm": 13, "residual": 14, "gated": 19}
"""Normed 2, g 1, its means 3, shift 1, scale 2, dx 4, and dh 1; of a gated branch h 2, its gradient 1, the gate's 2."""


def _case(letter: str, dtype: torch.dtype, form: str) -> Case:
    width = WIDTHS[letter]
    names = ("x", "branch") if form == "gated" else ("x",)

    def build(samples: int) -> Callable[[str], Inputs]:
        def inputs(device: str) -> Inputs:
            shapes = dict.fromkeys(names, (samples, TOKENS, width)) | {"modulations": (samples, 6 * width)}
            return {n: torch.randn(s, dtype=dtype, device=device).requires_grad_() for n, s in shapes.items()}

        return inputs

    return Case(
        op="adaln",
        shape=f"DiT-{letter}-{form}-{TOKENS}x{width}",
        dtype=dtype,
        build=build(SAMPLES),
        build_large=build(SAMPLES_LARGE),
        call=_CALLS[form],
        sums=("dmodulations",),
        # The residual stream is returned unchanged and is not written.
        forward_bytes=(lambda i: 2 * i["x"].nbytes + i["modulations"].nbytes) if form == "residual" else None,
        forward_operations=elements("x", _FORWARD[form]),
        backward_operations=elements("x", _BACKWARD[form]),
    )


CASES = [
    *(_case(letter, torch.bfloat16, form) for letter in WIDTHS for form in _CALLS),
    *(_case("XL", dtype, form) for dtype in (torch.float32, torch.float16) for form in _CALLS),
]
