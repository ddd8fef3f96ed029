"""Operands of FP8 products, rows and columns, at the shapes of a DiT."""

from functools import partial

import torch
from torch import Tensor

from fastdiff_bench.cases.adaln import SAMPLES, SAMPLES_LARGE, TOKENS, WIDTHS
from fastdiff_bench.cases.bias_gradient import HEADS
from fastdiff_bench.cases.case import Case, Inputs, elements
from fastdiff_kernels.fp8.cast import cast
from fastdiff_kernels.fp8.join import join
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


def _join_inputs(device: str, letter: str, samples: int) -> Inputs:
    heads, width = HEADS[letter]
    shape = (samples, TOKENS, heads, width)  # as cuDNN gives the gradients
    parts = {n: torch.randn(shape, device=device).bfloat16().transpose(1, 2) for n in ("dq", "dk", "dv")}
    return {**parts, "unit": torch.tensor(_UNIT, device=device)}


def _join(inputs: Inputs, backend: Backend) -> list[Tensor]:
    operand, dbias = join(**inputs, form=_FORM, backend=backend)
    return [*written(operand), dbias]


def _exact_join(inputs: Inputs) -> list[Tensor]:
    parts = torch.stack([inputs[n].transpose(1, 2) for n in ("dq", "dk", "dv")], 2)  # -> [B, T, 3, H, D]
    packed = parts.flatten(2).flatten(0, 1)
    return [*numbers(packed, inputs["unit"]), packed.sum(0)]


def _join_case(letter: str) -> Case:
    build = partial(_join_inputs, letter=letter)
    return Case(
        op="fp8",
        shape=f"DiT-{letter}-join-{TOKENS}x3x{HEADS[letter][0]}x{HEADS[letter][1]}",
        dtype=torch.bfloat16,
        least_arch=90,
        build=partial(build, samples=SAMPLES),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=_join,
        exact=_exact_join,
        sums=("out3",),
        forward_operations=lambda inputs: 3 * sum(int(inputs[n].numel()) for n in ("dq", "dk", "dv")),
    )


CASES = [
    *(_case(letter, torch.bfloat16) for letter in WIDTHS),
    *(_join_case(letter) for letter in HEADS),
    *(_case("XL", dtype) for dtype in (torch.float32, torch.float16)),
]
