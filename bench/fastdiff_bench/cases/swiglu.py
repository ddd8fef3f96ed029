"""SwiGLU behind the layer ``w12`` of a DiT with that MLP."""

import torch

from fastdiff_bench.cases.behind_linear import behind_linear
from fastdiff_bench.cases.case import Case
from fastdiff_kernels.swiglu import swiglu

# Width of the MLP, int(8 / 3 * D), of DiT-S, -B and -XL; that of -L, 2730, allows no wide accesses.
WIDTHS = {"S": 1024, "B": 2048, "XL": 3072}
TOKENS = 256

_OPERATIONS = 3, 8
"""Per element of u, two of which make one of the result.

Forward: sigmoid 3, two products. Backward: both sigmoids 5, slope 3, dv 2, dg 2, two sums.
"""


def _case(letter: str, dtype: torch.dtype) -> Case:
    return behind_linear(
        swiglu,
        op="swiglu",
        chosen_as="adaln",
        name=f"DiT-{letter}",
        shape=(TOKENS, 2 * WIDTHS[letter]),
        dtype=dtype,
        samples=(4, 64),
        operations=_OPERATIONS,
        halves=(3, 5),  # the result and dy have half of u
    )


CASES = [
    *(_case(letter, torch.bfloat16) for letter in WIDTHS),
    *(_case("XL", dtype) for dtype in (torch.float32, torch.float16)),
]
