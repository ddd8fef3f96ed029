"""GEGLU of the transformers in the UNet of Stable Diffusion 2 at 512 px."""

import torch

from fastdiff_bench.cases.behind_linear import behind_linear
from fastdiff_bench.cases.case import Case
from fastdiff_kernels.geglu import geglu

# Tokens and channels of a level; the layer before GEGLU has eight times the channels.
LEVELS = ((4096, 320), (1024, 640), (256, 1280), (64, 1280))

_OPERATIONS = 12, 16
"""Per element of u, two of which make one of the result.

Forward: distribution function 21, two products. Backward: that and the density 21, dv 2, dg 4, half of two sums.
"""


def _case(tokens: int, channels: int, dtype: torch.dtype) -> Case:
    return behind_linear(
        geglu,
        op="geglu",
        chosen_as="group_norm",
        name=f"SD2-{tokens}x{channels}",
        shape=(tokens, 8 * channels),
        dtype=dtype,
        samples=(1, 16),
        operations=_OPERATIONS,
        halves=(3, 5),  # the result and dy have half of u
    )


CASES = [
    *(_case(tokens, channels, torch.bfloat16) for tokens, channels in LEVELS),
    *(_case(*LEVELS[1], dtype) for dtype in (torch.float32, torch.float16)),
]
