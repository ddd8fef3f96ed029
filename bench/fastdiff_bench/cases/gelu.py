"""GELU behind the layer ``fc1`` of the DiT."""

import torch

from fastdiff_bench.cases.behind_linear import behind_linear
from fastdiff_bench.cases.case import Case
from fastdiff_kernels.gelu import gelu

# Width of the MLP of DiT-S, -B, -L and -XL.
WIDTHS = {"S": 1536, "B": 3072, "L": 4096, "XL": 4608}
TOKENS = 256

_OPERATIONS = 8, 17
"""Per element.

Forward: square 1, z 3, sigmoid 3, product 1. Backward: square 1, z 3, both sigmoids 5, slope 6, product 1, sum 1.
"""


def _case(letter: str, dtype: torch.dtype) -> Case:
    return behind_linear(
        gelu,
        op="gelu",
        chosen_as="adaln",
        name=f"DiT-{letter}",
        shape=(TOKENS, WIDTHS[letter]),
        dtype=dtype,
        samples=(4, 64),
        operations=_OPERATIONS,
        halves=(4, 6),  # backward: dy and u read, du written
    )


CASES = [
    *(_case(letter, torch.bfloat16) for letter in WIDTHS),
    *(_case("XL", dtype) for dtype in (torch.float32, torch.float16)),
]
