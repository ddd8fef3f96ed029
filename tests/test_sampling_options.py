"""Guidance on some channels, clamped estimates and classes that are drawn, against direct computations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.errors import ConfigError
from fastdiff.objective_config import DiffusionConfig
from fastdiff.sampling import SchedulerName, sample, uniform_labels
from fastdiff.schedule import betas

SCHEDULERS: tuple[SchedulerName, ...] = ("ddim", "dpmsolver++", "ddpm")
NULL = 9
LABELS = torch.tensor([3, 1, 7])
SHAPE = (4, 3, 5)


def network(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
    """Any function of all of its inputs, other ones for each channel: 4 that predict and 4 for the variance."""
    strength = torch.linspace(0.2, 0.9, 8).view(1, 8, 1, 1) * (1 + label.view(-1, 1, 1, 1))
    return torch.sin(strength * noisy.repeat(1, 2, 1, 1) + time.view(-1, 1, 1, 1) / 1000)


def draw(model: Any, objective: DiffusionConfig, **options: Any) -> Tensor:
    return sample(model, objective, {"label": LABELS}, shape=SHAPE, null={"label": torch.tensor(NULL)}, **options)


@pytest.mark.parametrize("guided", [1, 3, 4, None])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_guidance_of_the_first_channels_only(scheduler: SchedulerName, guided: int | None) -> None:
    objective = DiffusionConfig(variance="learned_range")

    def by_hand(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        found, without = network(noisy, time, label), network(noisy, time, torch.full_like(label, NULL))
        for channel in range(guided or 4):
            found[:, channel] = without[:, channel] + 2.5 * (found[:, channel] - without[:, channel])
        return found

    options: Any = {"scheduler": scheduler, "steps": 4, "seed": 8}
    expected = draw(by_hand, objective, **options)
    found = draw(network, objective, cfg=2.5, cfg_channels=guided, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    if guided != 4:
        other = draw(network, objective, cfg=2.5, cfg_channels=2, **options)
        assert (found - other).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize("channels", [0, 5])
def test_channels_that_are_not_there_cannot_be_guided(channels: int) -> None:
    with pytest.raises(ConfigError, match=f"guidance on {channels} channels: the model predicts 4, so from 1 to 4"):
        draw(network, DiffusionConfig(variance="learned_range"), cfg=2.0, cfg_channels=channels)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_clamped_estimates_end_in_the_range_of_pixels(scheduler: SchedulerName) -> None:
    def bright(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        return torch.full_like(noisy, 3.0) * torch.tensor([1, -1, 1, 0.1]).view(1, 4, 1, 1)

    objective = DiffusionConfig(prediction="x0")
    clipped = draw(bright, objective, scheduler=scheduler, steps=6, clip=True)
    ends = torch.tensor([1, -1, 1, 0.3]).view(1, 4, 1, 1).expand_as(clipped)
    torch.testing.assert_close(clipped, ends, rtol=0, atol=1e-5)
    assert draw(bright, objective, scheduler=scheduler, steps=6).max() > 2.5


def test_ddim_goes_on_from_the_clamped_estimate() -> None:
    """Its noise is what explains the input with the estimate clamped, as Nichol & Dhariwal 2021 have it."""
    objective = DiffusionConfig(prediction="epsilon")
    seen: list[Tensor] = []

    def spy(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        seen.append(noisy.double())
        return network(noisy, time, label)[:, :4]

    draw(spy, objective, scheduler="ddim", steps=2, clip=True)
    alpha_bar = torch.cumprod(1 - betas(objective), 0)
    now, after = alpha_bar[999], alpha_bar[499]
    predicted = network(seen[0], torch.full((3,), 999), LABELS)[:, :4]
    unclamped = (seen[0] - (1 - now).sqrt() * predicted) / now.sqrt()
    assert unclamped.abs().max() > 1.5
    clean = unclamped.clamp(-1, 1)
    noise = (seen[0] - now.sqrt() * clean) / (1 - now).sqrt()
    torch.testing.assert_close(seen[1], after.sqrt() * clean + (1 - after).sqrt() * noise, rtol=0, atol=1e-4)


def test_classes_are_drawn_evenly_each_from_its_own_number() -> None:
    labels = uniform_labels(3, range(4000), 10)
    assert labels.dtype == torch.int64
    counts = labels.bincount(minlength=10)
    assert len(counts) == 10
    # Chi squared of 9 degrees of freedom: 27.9 is exceeded once in a thousand seeds, and this is one seed.
    assert ((counts - 400.0) ** 2 / 400).sum() < 27.9
    assert torch.equal(uniform_labels(3, range(70, 90), 10), labels[70:90])
    assert not torch.equal(uniform_labels(4, range(4000), 10), labels)
    assert uniform_labels(-1, range(50), 1).tolist() == [0] * 50


def test_the_class_of_an_image_tells_nothing_of_its_noise() -> None:
    seen: list[Tensor] = []

    def spy(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        seen.append(noisy[:, 0, 0, 0])
        return torch.zeros_like(noisy)

    labels = uniform_labels(0, range(2000), 2)
    sample(spy, DiffusionConfig(), {"label": labels}, shape=(1, 1, 1), null={}, steps=1, seed=0, batch=2000)
    correlation = torch.corrcoef(torch.stack([labels.float(), seen[0]]))[0, 1]
    assert abs(correlation) < 4 / 2000**0.5
