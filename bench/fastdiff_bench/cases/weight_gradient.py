"""Gradients of the weights of a DiT's MLP in both layouts: ``g^T x``, and ``x^T g`` transposed."""

from functools import partial

import torch
from torch import Tensor

from fastdiff_bench.cases.adaln import TOKENS, WIDTHS
from fastdiff_bench.cases.case import Case, Inputs, Outputs

SAMPLES, SAMPLES_LARGE = 1, 256


def _inputs(device: str, given: int, made: int, samples: int) -> Inputs:
    rows = samples * TOKENS
    shapes = {"x": (rows, given), "g": (rows, made)}
    return {name: torch.randn(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}


def _call(inputs: Inputs, backend: str) -> Outputs:
    x, g = inputs["x"], inputs["g"]
    gradient: Tensor = (x.t() @ g).t() if backend == "swapped" else g.t() @ x
    return gradient


def _operations(inputs: Inputs) -> int:
    return 2 * int(inputs["x"].numel()) * int(inputs["g"].shape[1])


def _case(letter: str, layer: str) -> Case:
    width = WIDTHS[letter]
    given, made = (width, 4 * width) if layer == "fc1" else (4 * width, width)
    build = partial(_inputs, given=given, made=made)
    return Case(
        op="weight_gradient",
        backends=("reference", "swapped"),
        shape=f"DiT-{letter}-{layer}",
        dtype=torch.bfloat16,
        build=partial(build, samples=SAMPLES),
        build_large=partial(build, samples=SAMPLES_LARGE),
        call=_call,
        forward_operations=_operations,
        arithmetic=str(torch.bfloat16),
    )


CASES = [_case(letter, layer) for letter in ("L", "XL") for layer in ("fc1", "fc2")]
