"""Biases of convolutions that the norm behind them adds: residual blocks by the kernels, beside torch."""

import pytest
import torch
from torch import nn

from fastdiff.models.adm import blocks as adm
from fastdiff.models.unet import blocks as unet
from fastdiff_bench.correctness.accuracy import assert_as_accurate_as_eager
from fastdiff_kernels import dispatch
from tests.support.nights import by_day

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHANNELS, WIDER, TIME, GROUPS = 16, 24, 12, 4
SHAPE = (3, CHANNELS, 6, 4)


class Blocks(nn.Module):
    """Two residual blocks, the first with a shortcut, and the norm that reads the output of the second."""

    def __init__(self, kind):
        super().__init__()
        widths = ((CHANNELS, WIDER), (WIDER, WIDER))
        if kind == "unet":
            found = [unet.ResBlock(*each, TIME, GROUPS) for each in widths]
        else:
            options = {"scale_shift": kind == "adm", "resize": None, "dropout": adm.Dropout(0.0, 0, 0)}
            found = [adm.ResBlock(*each, TIME, GROUPS, **options) for each in widths]
        self.blocks, self.norm = nn.ModuleList(found), unet.GroupNorm(GROUPS, WIDER)

    def forward(self, x, time):
        terms = (x, None, None)
        for block in self.blocks:
            terms = block(*terms, time)[:3]
        branch, base, shift = terms
        return self.norm(branch, shift=shift, residual=base)


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prepared(kind, dtype, device):
    """The blocks, and their inputs and weights by name."""
    torch.manual_seed(0)
    model = Blocks(kind)
    given = {"x": normal(SHAPE, 1), "time": normal((SHAPE[0], TIME), 2)}
    given |= {name: p.detach() + 0.1 * normal(p.shape, len(name)) for name, p in model.named_parameters()}
    leaves = {name: value.to(device, dtype) for name, value in given.items()}
    leaves["x"] = leaves["x"].contiguous(memory_format=torch.channels_last)
    return model, {name: value.requires_grad_() for name, value in leaves.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", by_day(["adm added"], "unet", "adm"))
def test_blocks_are_as_accurate_as_with_biases_in_the_convolutions(kind, dtype, device):
    model, given = prepared(kind, dtype, device)
    shape = (SHAPE[0], WIDER, *SHAPE[2:])
    upstream = [normal(shape, seed).to(device).contiguous(memory_format=torch.channels_last) for seed in (3, 4)]

    def by(backend):
        def op(x, time, **weights):
            with dispatch.forced(group_norm=backend):
                return torch.func.functional_call(model, weights, (x, time))

        return op

    sums = {f"d{name}" for name in given if name not in ("x", "time")}
    assert_as_accurate_as_eager(by("triton"), by("reference"), given, upstream, sums=sums)
