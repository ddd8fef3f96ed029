"""Initial weights that are drawn one after another, and networks that ZeRO-3 cuts up without ever having them whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.models.build import build_deferred, build_model
from fastdiff.models.deferred import Deferred
from tests.support.nights import by_day
from tests.support.references import adm_networks, unet_reference

SHAPES: dict[str, ModelConfig] = {
    "dit": DiTConfig(channels=1, size=8, patch=2, hidden=32, depth=2, heads=2, classes=10, learn_sigma=True),
    **unet_reference.SMALL,
    **adm_networks.SMALL,
}


class _Odd(nn.Module):
    """Weights that are set by chains of operations, in part, from one another, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated = nn.Parameter(torch.empty(40, 30))
        with torch.no_grad():
            self.truncated.uniform_(-1, 1).erfinv_().mul_(0.02).clamp_(-0.03, 0.03)
        self.orthogonal = nn.Parameter(torch.empty(20, 30))
        with torch.no_grad():
            self.orthogonal.copy_(torch.linalg.qr(torch.empty(30, 20).normal_()).Q.T)
        self.rows = nn.Parameter(torch.zeros(50, 4))
        with torch.no_grad():
            self.rows[10:20].normal_()
            self.rows[15].mul_(3)
        self.sum = nn.Parameter(self.truncated.detach()[:20] + self.orthogonal.detach())
        self.again = nn.Linear(30, 20)
        nn.init.kaiming_normal_(self.again.weight)
        self.none = nn.Parameter(torch.empty(0, 3))
        self.random = nn.Parameter(torch.randn(17))
        self.register_buffer("table", torch.arange(6.0).view(2, 3) / 7)


def _whole(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return dict(build().state_dict())


def test_any_constructor_gives_the_same_weights() -> None:
    expected = _whole(_Odd, 5)
    before = torch.get_rng_state()
    found = dict(Deferred(_Odd, 5).weights())
    assert torch.equal(torch.get_rng_state(), before)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", by_day([2**63 + 3], 0, 2**64 + 3))
def test_every_network_has_the_weights_of_the_whole_one(name: str, seed: int) -> None:
    expected = build_model(SHAPES[name], seed=seed).state_dict()
    deferred = build_deferred(SHAPES[name], seed=seed)
    assert all(p.is_meta for p in deferred.network.parameters())
    found = dict(deferred.weights())
    assert found.keys() <= expected.keys()
    assert {*dict(deferred.network.named_parameters())} <= found.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def test_weights_are_let_go_one_by_one() -> None:
    """Of 40 layers, a few are alive at a time."""

    def build() -> nn.Module:
        network = nn.Sequential(*(nn.Linear(100, 100) for _ in range(40)))
        for layer in network:
            nn.init.normal_(layer.weight)
        return network

    alive: list[int] = []
    deferred = Deferred(build, 0)
    weights = deferred.weights()
    for _ in weights:
        frame = weights.gi_frame
        assert frame is not None
        alive.append(sum(len(value) for value in frame.f_locals["memory"].values()))
    assert max(alive) < 4 * (4 * 100 * 100) + 40 * 4 * 100
