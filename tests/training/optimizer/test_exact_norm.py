"""The norm that is the same to the bit however its elements are cut and ordered."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fastdiff.parallel.world import World
from fastdiff.training.optimizer.clipping import norm_of
from fastdiff.training.optimizer.exact_norm import exact_norm
from tests.support.forked import forked_ranks, values

CPU = torch.device("cpu")


def gradient() -> Tensor:
    """Values over several orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(200_000, generator=generator) * torch.randn(200_000, generator=generator).exp()


def norms(world: World, parts: Sequence[Tensor]) -> float:
    return float(exact_norm(torch.split(parts[world.rank], 777), CPU, world))


def test_it_depends_neither_on_order_nor_on_ranks() -> None:
    values_ = gradient()
    expected = exact_norm([values_], CPU)
    assert len({float(norm_of(torch.split(values_, size))) for size in (777, 1001, 1999)}) > 1  # unlike this one
    shuffled = values_[torch.randperm(len(values_), generator=torch.Generator().manual_seed(1))]
    assert torch.equal(exact_norm(torch.split(shuffled, 1001), CPU), expected)
    for ranks in (2, 3):
        found = values(forked_ranks(norms, shuffled.tensor_split(ranks), ranks=ranks))
        assert found == [float(expected)] * ranks


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_norm(scale: float, dtype: torch.dtype) -> None:
    given = (gradient() * scale).to(dtype)
    expected = math.sqrt(math.fsum(float(x) ** 2 for x in given))
    assert float(exact_norm([given], CPU)) == pytest.approx(expected, rel=2**-23)


def test_of_nothing_it_is_zero_and_of_what_is_not_finite_infinite() -> None:
    assert exact_norm([], CPU) == exact_norm([torch.zeros(3)], CPU) == 0
    for value in (math.nan, math.inf, -math.inf):
        assert exact_norm([torch.tensor([1.0, value])], CPU) == math.inf
    assert exact_norm([torch.full((4,), 3e38)], CPU) == math.inf  # beyond fp32
