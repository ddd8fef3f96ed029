"""Operands of FP8 products, rows and columns, at the shapes of a DiT."""

from functools import partial

import torch
from torch import Tensor

from fastdiff_bench.cases.adaln import SAMPLES, SAMPLES_LARGE, TOKENS, WIDTHS
from fastdiff_bench.cases.case import Case, Inputs, elements
from fastdiff_kernels.fp8.cast import cast
from fastdiff_kernels.fp8.values import Form, Quantised
from fastdiff_kernels.names import Backend

_FORM = Form(rows=True, columns=True)
_UNIT = 2.0**-7
"""Scale at which a normal number of 3 standard deviations is 384."""


def _inputs(device: str, width: int, dtype: torch.dtype, samples: int) -> Inputs:
    x = torch.randn(samples * TOKENS, width, dtype=dtype, device=device)
    return {"x": x, "unit": torch.tensor(_UNIT, device=device)}


def _cast(inputs: Inputs, backend: Backend) -> list[Tensor]:
    return written(cast(inputs["x"], inputs["unit"], _FORM, backend=backend))


def _exact(inputs: Inputs) -> list[Tensor]:
    return numbers(inputs["x"], inputs["unit"])


def written(operand: Quantised) -> list[Tensor]:
    """Return rows, columns and the maximum."""
    assert operand.rows is not None
    assert operand.columns is not None
    return [operand.rows, operand.columns, operand.maxima.amax()]


def numbers(values: Tensor, unit: Tensor) -> list[Tensor]:
    """Return ``written`` of fp64 values ``[N, C]`` before rounding."""
    rows = (values / unit).clamp(-448, 448)
    return [rows, rows.t(), values.abs().amax()]


def _case(letter: str, dtype: torch.dtype) -> Case:
    build = partial(_inputs, width=WIDTHS[letter], dtype=dtype)
    return Case(
        op="fp8",
        shape=f"DiT-{letter}-cast-{TOKENS}x{WIDTHS[letter]}",
        dtype=dtype,
        least_arch=90,
        build=partial(build, samples=SAMPLES),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=_cast,
        exact=_exact,
        forward_operations=elements("x", 2),
    )


CASES = [
    *(_case(letter, torch.bfloat16) for letter in WIDTHS),
    *(_case("XL", dtype) for dtype in (torch.float32, torch.float16)),
]
