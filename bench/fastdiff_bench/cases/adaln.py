"""adaLN with the tensor layout of the DiT: shifts, scales and gates are parts of one tensor."""

from collections.abc import Callable
from typing import Any

import torch

from fastdiff_bench.cases.case import Case, Inputs, Outputs, elements
from fastdiff_kernels.adaln import (
    Modulation,
    gated_modulated_norm,
    gated_residual,
    modulated_norm,
    residual_modulated_norm,
)
from fastdiff_kernels.names import Backend

# Channels of DiT-S, -B, -L and -XL.
WIDTHS = {"S": 384, "B": 768, "L": 1024, "XL": 1152}
TOKENS = 256
SAMPLES = 4
SAMPLES_LARGE = 64


def _norm(inputs: Inputs, backend: Backend, **rms: Any) -> Outputs:
    return modulated_norm(inputs["x"], Modulation(inputs["modulations"]), backend=backend, **rms)


def _residual(inputs: Inputs, backend: Backend, **rms: Any) -> Outputs:
    return residual_modulated_norm(inputs["x"], Modulation(inputs["modulations"]), backend=backend, **rms)


def _gated(inputs: Inputs, backend: Backend, **rms: Any) -> Outputs:
    modulation, bias = Modulation(inputs["modulations"]), inputs.get("bias")
    return gated_modulated_norm(inputs["x"], inputs["branch"], modulation, bias=bias, backend=backend, **rms)


def _gate(inputs: Inputs, backend: Backend) -> Outputs:
    modulation = Modulation(inputs["modulations"])
    return gated_residual(inputs["x"], inputs["branch"], modulation, bias=inputs["bias"], backend=backend)


def _rms(call: Callable[..., Outputs]) -> Callable[[Inputs, Backend], Outputs]:
    return lambda inputs, backend: call(inputs, backend, norm="rms", weight=inputs["weight"])


_CALLS = {"norm": _norm, "residual": _residual, "gated": _gated, "biased": _gated, "gate": _gate}
"""Biased: gated, with the bias of the layer before, as in the DiT; the gate has it, too."""
_RMS_CALLS = {f"rms-{form}": _rms(_CALLS[form]) for form in ("norm", "residual", "biased")}
"""RMSNorm with a weight."""
_INPUTS = {
    "gated": ("x", "branch"), "biased": ("x", "branch", "bias"), "gate": ("x", "branch", "bias"),
    "rms-norm": ("x", "weight"), "rms-residual": ("x", "weight"), "rms-biased": ("x", "branch", "bias", "weight"),
}  # fmt: skip
_VECTORS = {"bias", "weight"}
"""Inputs ``[D]``."""

_FORWARD = {"norm": 7, "residual": 7, "gated": 9, "biased": 10, "gate": 3}
_FORWARD |= {f"rms-{form}": _FORWARD[form] - 2 for form in ("norm", "residual", "biased")}
"""Operations per element: mean 1, centred 1, variance 2, normed 1, modulated 2; a gated branch 2, a bias 1. RMSNorm has
no mean; a weight is a factor of the modulation."""
_BACKWARD = {"norm": 13, "residual": 14, "gated": 19, "biased": 21, "gate": 4}
_BACKWARD |= {f"rms-{form}": _BACKWARD[form] - 3 for form in ("norm", "residual", "biased")}
"""Normed 2, g 1, its means 3, shift 1, scale 2, dx 4, and dh 1; of a gated branch h 2, its gradient 1, the gate's 2, a
bias's 1 to 2."""


def _case(letter: str, dtype: torch.dtype, form: str) -> Case:
    width = WIDTHS[letter]
    names = _INPUTS.get(form, ("x",))

    def build(samples: int) -> Callable[[str], Inputs]:
        def inputs(device: str) -> Inputs:
            shapes: dict[str, tuple[int, ...]]
            shapes = dict.fromkeys(names, (samples, TOKENS, width)) | {"modulations": (samples, 6 * width)}
            shapes |= {name: (width,) for name in names if name in _VECTORS}
            return {n: torch.randn(s, dtype=dtype, device=device).requires_grad_() for n, s in shapes.items()}

        return inputs

    return Case(
        op="adaln",
        shape=f"DiT-{letter}-{form}-{TOKENS}x{width}",
        dtype=dtype,
        build=build(SAMPLES),
        build_large=build(SAMPLES_LARGE),
        call=(_CALLS | _RMS_CALLS)[form],
        sums=("dmodulations", *(f"d{name}" for name in names if name in _VECTORS)),
        # The residual stream is returned unchanged and is not written.
        forward_bytes=(lambda i: 2 * i["x"].nbytes + i["modulations"].nbytes) if "residual" in form else None,
        forward_operations=elements("x", _FORWARD[form]),
        backward_operations=elements("x", _BACKWARD[form]),
    )


CASES = [
    *(_case(letter, torch.bfloat16, form) for letter in WIDTHS for form in _CALLS),
    *(_case("XL", torch.bfloat16, form) for form in _RMS_CALLS),
    *(_case("XL", dtype, form) for dtype in (torch.float32, torch.float16) for form in (*_CALLS, "rms-biased")),
]
