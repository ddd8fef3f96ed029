"""Norm and rotation of queries and keys, behind the layer ``qkv`` of a DiT, as three views and packed."""

from collections.abc import Callable, Mapping

import torch

from fastdiff_bench.cases.case import Case, Inputs, Outputs, elements
from fastdiff_kernels.names import Backend
from fastdiff_kernels.rotary import rotated, rotated_parts

# Heads and channels of a head of DiT-B, DiT-XL, JiT-H, and wide heads.
HEADS = {"B": (12, 64), "XL": (16, 72), "H": (16, 80), "wide": (8, 128)}
TOKENS = 256
SAMPLES, SAMPLES_LARGE = 2, 64

_ANGLES, _WEIGHTS = ("cos", "sin"), ("q_weight", "k_weight")
FORMS: Mapping[str, tuple[Callable[..., Outputs], tuple[str, ...], int]] = {
    "parts": (rotated_parts, (*_ANGLES, *_WEIGHTS), 8),
    "packed": (rotated, (*_ANGLES, *_WEIGHTS), 12),
    "rotation": (rotated_parts, _ANGLES, 8),
    "norm": (rotated_parts, _WEIGHTS, 8),
}
"""Op, arguments, and bytes forward per channel of a token in 16 bits."""


def _operations(names: tuple[str, ...]) -> tuple[int, int]:
    """Operations per element of u, two thirds of which are queries and keys: forward and backward.

    Norm: square and sum 2, two products; backward: normed 3, its mean 2, dweight 2, products 2, dx 3. Rotation: 3
    each way. Backward also the sum of the bias.
    """
    norm, turned = "q_weight" in names, "cos" in names
    return (4 * norm + 3 * turned) * 2 // 3, (12 * norm + 3 * turned) * 2 // 3 + 1


def _case(letter: str, form: str, dtype: torch.dtype) -> Case:
    heads, width = HEADS[letter]
    function, names, moved = FORMS[form]

    def build(samples: int) -> Callable[[str], Inputs]:
        def inputs(device: str) -> Inputs:
            angles = 3 * torch.randn(TOKENS, width // 2, device=device)
            table = {"cos": angles.cos(), "sin": angles.sin()}
            shapes = {"u": (samples, TOKENS, 3, heads, width), "bias": (3 * heads * width,)}
            shapes |= {name: (width,) for name in names if name in _WEIGHTS}
            trained = {n: torch.randn(s, dtype=dtype, device=device).requires_grad_() for n, s in shapes.items()}
            return trained | {name: table[name] for name in names if name in table}

        return inputs

    def call(inputs: Inputs, backend: Backend) -> Outputs:
        return function(**inputs, backend=backend)

    def of_u(share: int) -> Callable[[Inputs], int]:
        """``share`` bytes of each channel of a token, in 16 bits; ``u`` has 6."""
        return lambda inputs: share * int(inputs["u"].nbytes) // 6

    operations = _operations(names)
    return Case(
        op="rotary",
        chosen_as="adaln",
        shape=f"DiT-{letter}-{form}",
        dtype=dtype,
        build=build(SAMPLES),
        build_large=build(SAMPLES_LARGE),
        call=call,
        sums=("dbias", *(f"d{name}" for name in names if name in _WEIGHTS)),
        forward_bytes=of_u(moved),
        backward_bytes=of_u(16 if "q_weight" in names else 12),
        forward_operations=elements("u", operations[0]),
        backward_operations=elements("u", operations[1]),
    )


CASES = [
    *(_case(letter, "parts", torch.bfloat16) for letter in HEADS),
    *(_case("XL", form, torch.bfloat16) for form in FORMS if form != "parts"),
    *(_case("XL", "parts", dtype) for dtype in (torch.float32, torch.float16)),
]
