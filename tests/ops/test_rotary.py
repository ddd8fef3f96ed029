"""Rotary embedding and norm of queries and keys: accuracy, formula, compilation, bytes, tiles and refusals."""

from itertools import product

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager, evaluate
from fastdiff_kernels import dispatch
from fastdiff_kernels import rotary as op
from fastdiff_kernels.bias_gradient import plan
from fastdiff_kernels.packed_attention import packed_attention
from fastdiff_kernels.rotary import Rotary, rotated, rotated_parts
from tests.support.nights import by_day

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {
    "DiT-S": (2, 5, 6, 64),
    "DiT-XL": (1, 9, 16, 72),
    "JiT-H": (2, 7, 16, 80),
    "wide heads": (1, 6, 4, 128),
    "one head": (2, 35, 1, 24),
    "odd heads": (2, 3, 3, 14),
    "one pair": (1, 4, 5, 2),
}
"""Samples, tokens, heads, channels of a head."""
PARTS = {
    "both": ("cos", "sin", "q_weight", "k_weight"),
    "rotation": ("cos", "sin"),
    "norm": ("q_weight", "k_weight"),
}
parts = pytest.mark.parametrize("names", PARTS.values(), ids=PARTS)
OPS = {"packed": (rotated, op.rotated_reference), "parts": (rotated_parts, op.rotated_parts_reference)}
forms = pytest.mark.parametrize("form", OPS)
SUMS = {"dbias", "dq_weight", "dk_weight"}


def normal(shape, device, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def arguments(shape, names, device, dtype=torch.float32):
    """A projection, its bias, and of the other arguments the named ones; the first token is not rotated."""
    batch, length, heads, width = shape
    angles = 3 * normal((length, width // 2), device, seed=1)
    angles[:1] = 0
    found = {"cos": angles.cos(), "sin": angles.sin()}
    found |= {f"{n}_weight": 1 + normal((width,), device, dtype, 2 + i) / 2 for i, n in enumerate("qk")}
    found = {name: found[name] for name in names}
    found |= {"u": 3 * normal((batch, length, 3, heads, width), device, dtype)}
    found |= {"bias": normal((3 * heads * width,), device, dtype, 4)}
    return {name: tensor.requires_grad_(name not in ("cos", "sin")) for name, tensor in found.items()}


def upstream(form, shape, device):
    batch, length, heads, width = shape
    if form == "packed":
        return [normal((batch, length, 3, heads, width), device, seed=5)]
    return [normal((batch, heads, length, width), device, seed=5 + i) for i in range(3)]


def by_triton(form):
    return lambda **given: OPS[form][0](**given, backend="triton")


@pytest.mark.parametrize(
    ("name", "names", "form", "dtype"),
    [
        (name, names, form, DTYPES[number % 3])
        for number, (name, (names, form)) in enumerate(product(SHAPES, product(PARTS.values(), OPS)))
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_as_accurate_as_eager(name, names, form, dtype, device):
    shape = SHAPES[name]
    inputs, seeds = arguments(shape, names, device, dtype), upstream(form, shape, device)
    assert_as_accurate_as_eager(by_triton(form), OPS[form][1], inputs, seeds, sums=SUMS)
