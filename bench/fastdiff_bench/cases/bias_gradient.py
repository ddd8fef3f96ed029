"""The split into queries, keys and values that sums the gradient of a bias, behind the layer ``qkv`` of the DiT."""

import torch

from fastdiff_bench.cases.behind_linear import behind_linear
from fastdiff_bench.cases.case import Case
from fastdiff_kernels.bias_gradient import unpacked

# Heads and channels of a head of DiT-S, -B, -L and -XL.
HEADS = {"S": (6, 64), "B": (12, 64), "L": (16, 64), "XL": (16, 72)}
TOKENS = 256


def _case(letter: str, dtype: torch.dtype) -> Case:
    return behind_linear(
        unpacked,
        op="bias_gradient",
        chosen_as="adaln",
        name=f"DiT-{letter}-unpacked",
        shape=(TOKENS, 3, *HEADS[letter]),
        dtype=dtype,
        samples=(4, 64),
        operations=(0, 1),
        halves=(0, 4),  # views forward
    )


CASES = [
    *(_case(letter, torch.bfloat16) for letter in HEADS),
    *(_case("XL", dtype) for dtype in (torch.float32, torch.float16)),
]
