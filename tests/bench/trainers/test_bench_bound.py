"""The variational bound as the peers of the benchmark compute it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.diffusion.variational import Variational
from fastdiff_bench.trainers.plain_torch import Noise
from fastdiff_bench.trainers.published import Published

CONFIG = DdpmConfig(prediction="epsilon", variance="learned_range")
TIMES = [0, 0, 0, 1, 2, 10, 500, 998, 999]


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Clean latents, some of them beyond the outermost bins, their noise, what a network might say of it, timesteps."""
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, len(TIMES), 4, 6, 6, generator=generator).unbind(0)
    clean[1] = clean[1].sign()  # edges of the 8-bit range
    clean[2, 0], clean[2, 1] = 0.9985, -0.993  # just inside of them
    said = torch.randn(len(TIMES), 8, 6, 6, generator=generator)
    said[:, :4] = 0.9 * noise + 0.1 * said[:, :4]
    return clean, noise, said.requires_grad_(), torch.tensor(TIMES)


def fastdiffs(clean: Tensor, noise: Tensor, said: Tensor, time: Tensor) -> Tensor:
    squared = ((said[:, :4] - noise) ** 2).mean()
    return squared + Variational(CONFIG, "cpu").loss(said, clean, noise, time).mean()


def plain(clean: Tensor, noise: Tensor, said: Tensor, time: Tensor) -> Tensor:
    return Noise(CONFIG, torch.device("cpu")).loss(said, clean, noise, time)


def published(clean: Tensor, noise: Tensor, said: Tensor, time: Tensor) -> Tensor:
    def model(noisy: Tensor, told: Tensor) -> Tensor:
        torch.testing.assert_close(noisy, Noise(CONFIG, torch.device("cpu")).noisy(clean, noise, time))
        assert torch.equal(told, time)
        return said

    return Published(CONFIG).loss(model, clean, noise, time)


@pytest.mark.parametrize("peer", [plain, published])
def test_a_peer_learns_the_variance_by_the_same_loss(peer: Any, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    _, _, said, _ = batch
    expected, found = fastdiffs(*batch), peer(*batch)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-4, atol=0)
    (ours,), (theirs,) = (torch.autograd.grad(loss, said) for loss in (expected, found))
    assert ours[:, 4:].abs().max() > 0
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4 * ours.abs().max().item())


@pytest.mark.parametrize("peer", [plain, published])
def test_a_prediction_that_is_far_off_has_the_same_least_probability(
    peer: Any, batch: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    clean, noise, said, time = batch
    far = said.detach().clone()
    far[time == 0, :4] += 20.0  # 28 standard deviations
    given = clean, noise, far.requires_grad_(), time
    bits = Variational(CONFIG, "cpu").loss(far, clean, noise, time)[time == 0]
    assert bits.max() > 0.5 * 12 * math.log2(10), "of 1e-12"
    expected, found = fastdiffs(*given), peer(*given)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-4, atol=0)
    (ours,), (theirs,) = (torch.autograd.grad(loss, far) for loss in (expected, found))
    torch.testing.assert_close(theirs[:, 4:], ours[:, 4:], rtol=1e-3, atol=1e-4 * ours[:, 4:].abs().max().item())


def test_the_published_step_reads_its_tables_as_often_as_the_script_does(
    batch: tuple[Tensor, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 for the noisy latents, 4 + 2 + 2 + 4 for the bound, and 4 for a target that is not used."""
    read: list[str] = []
    original = torch.from_numpy

    def counted(array: Any) -> Tensor:
        assert array.dtype == "float64"
        read.append(array.shape)
        return original(array)

    monkeypatch.setattr(torch, "from_numpy", counted)
    published(*batch)
    assert read == [(1000,)] * 18


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ({}, True),
        ({"prediction": "v"}, False),
        ({"variance": "fixed_small"}, False),
        ({"loss": "rescaled_mse"}, False),
        ({"min_snr_gamma": 5.0}, False),
        ({"schedule": "cosine"}, False),
        ({"timesteps": 500}, False),
        ({"zero_terminal_snr": True, "prediction": "v"}, False),
    ],
)
def test_the_published_step_is_for_its_own_objective(given: dict[str, Any], known: bool) -> None:
    assert Published.trains(DdpmConfig(**{"variance": "learned_range", **given})) is known
