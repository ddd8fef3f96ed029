"""The order in which gradients of a tensor with several readers are added up."""

import pytest
import torch
from torch import Tensor, nn

from fastdiff.training.engines.joined_uses import join_uses


class Twice(nn.Module):
    """Reads its input twice."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x + 3 * x


class Network(nn.Module):
    """Has another reader of the input, which autograd comes to first."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.twice(x) + 1e8 * x
        return total


@pytest.mark.parametrize(
    ("blocks", "expected"), [(None, 1e8), ((), 1e8 + 8), ((Twice,), 1e8 + 8), ((Network,), 1e8)], ids=str
)
def test_a_module_adds_up_its_own_uses_first(blocks: tuple[type[nn.Module], ...] | None, expected: float) -> None:
    """1e8 + 3 is 1e8 in fp32, and 1e8 + 6 is 1e8 + 8; what is within a block stays as it is."""
    network, x = Network(), torch.ones((), requires_grad=True)
    if blocks is not None:
        join_uses(network, blocks)
    network(x).backward()
    assert x.grad is not None
    assert float(x.grad) == expected
