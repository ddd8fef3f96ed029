"""Contrastive flow matching against its formula in float64, for any split into micro-batches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError
from fastdiff.rng import Stream, normal
from fastdiff.training.callbacks.validation import validated

SHAPE, SEED, WEIGHT = (3, 4, 4), 5, 0.2


def objective(**options: Any) -> Objective:
    config = FlowConfig(condition_dropout=0, contrastive_weight=WEIGHT, **options)
    return Objective(config, seed=SEED, null={}, device="cpu", posterior=False)


def batch_of(count: int, *, first: int = 24, masked: bool = False) -> Batch:
    """Samples whose latents follow from their position."""
    position = torch.arange(first, first + count)
    latents = torch.stack([torch.randn(SHAPE, generator=torch.Generator().manual_seed(int(n))) for n in position])
    mask = (torch.arange(16).view(1, 4, 4) % 3 / 2).expand(count, 4, 4).half() if masked else None
    return Batch(latents, position, {}, mask)


def prediction_of(batch: Batch) -> Tensor:
    return 0.5 * normal(1, Stream.LIKELIHOOD, batch.position, SHAPE)


def losses(made: Objective, batch: Batch) -> tuple[Tensor, Tensor]:
    """Losses, and their gradient in the prediction."""
    prediction = prediction_of(batch).requires_grad_()
    found = made.loss(prediction, batch, made.add_noise(batch))
    found.sum().backward()
    assert prediction.grad is not None
    return found.detach(), prediction.grad


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt"])
def test_loss_and_gradient_are_those_of_the_formula(weighting: Any, masked: bool) -> None:
    """w (|v - u|^2 - 0.2 |v - u'|^2), u' being the target of position n XOR 1; v goes from the data to the noise."""
    made, batch = objective(weighting=weighting, path="linear"), batch_of(6, masked=masked)
    levels = made.add_noise(batch).levels
    noise = normal(SEED, Stream.NOISE, batch.position, SHAPE).double()
    target = noise - batch.latents.double()
    weights = levels.weights[levels.row].double()
    inside = torch.ones(6, 4, 4).double() if batch.mask is None else batch.mask.double()
    prediction = prediction_of(batch).double().requires_grad_()
    expected = []
    for row in range(6):
        own = ((prediction[row] - target[row]) ** 2 * inside[row]).mean()
        other = ((prediction[row] - target[row ^ 1]) ** 2 * inside[row]).mean()
        expected.append(weights[row] * (own - WEIGHT * other))
    exact = torch.stack(expected)
    exact.sum().backward()
    found, gradient = losses(made, batch)
    torch.testing.assert_close(found.double(), exact.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), prediction.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("micro", [2, 4, 6])
def test_any_even_micro_batch_gives_the_same_bits(micro: int) -> None:
    whole, gradient = losses(objective(), batch_of(12))
    parts = [losses(objective(), batch_of(micro, first=24 + first)) for first in range(0, 12, micro)]
    assert torch.equal(torch.cat([part[0] for part in parts]), whole)
    assert torch.equal(torch.cat([part[1] for part in parts]), gradient)


def test_validation_is_without_it() -> None:
    assert validated(objective().config) == validated(FlowConfig(condition_dropout=0))


def test_what_cannot_be_is_refused() -> None:
    made, odd = objective(), batch_of(3)
    with pytest.raises(ConfigError, match=r"--objective.contrastive_weight 0.2 .* a micro-batch has 3; choose an even"):
        made.loss(prediction_of(odd), odd, made.add_noise(odd))
    for wrong in ({"contrastive_weight": 1.0}, {"contrastive_weight": 0.1, "prediction": "x0"}):
        with pytest.raises(ConfigError, match=r"--objective.contrastive_weight .*: 0, or above and below 1 with"):
            FlowConfig(**wrong)
