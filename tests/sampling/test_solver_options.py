"""Guidance on some channels, clamped estimates and drawn classes, against direct computations."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig, ObjectiveConfig
from fastdiff.config.sections.sampler import SamplerConfig, SchedulerName
from fastdiff.diffusion.schedules import Schedule, betas
from fastdiff.errors import ConfigError
from fastdiff.sampling.solvers import _generator, sample, uniform_labels
from tests.support.references.gaussian import sampler_of

SCHEDULERS: tuple[SchedulerName, ...] = ("ddim", "dpmsolver++", "ddpm")
NULL = 9
LABELS = torch.tensor([3, 1, 7])
SHAPE = (4, 3, 5)


def network(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
    """Any function of all of its inputs, other ones for each channel: 4 that predict and 4 for the variance."""
    strength = torch.linspace(0.2, 0.9, 8).view(1, 8, 1, 1) * (1 + label.view(-1, 1, 1, 1))
    return torch.sin(strength * noisy.repeat(1, 2, 1, 1) + time.view(-1, 1, 1, 1) / 1000)


def draw(model: Any, objective: ObjectiveConfig, **options: Any) -> Tensor:
    null = {"label": torch.tensor(NULL)}
    return sample(model, objective, {"label": LABELS}, sampler_of(options), shape=SHAPE, null=null, **options)


@pytest.mark.parametrize("guided", [1, 3, 4, None])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_guidance_of_the_first_channels_only(scheduler: SchedulerName, guided: int | None) -> None:
    objective = DdpmConfig(variance="learned_range")

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
    with pytest.raises(ConfigError, match=f"guidance on {channels} channels: choose 1 to 4, the channels"):
        draw(network, DdpmConfig(variance="learned_range"), cfg=2.0, cfg_channels=channels)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_clamped_estimates_end_in_the_range_of_pixels(scheduler: SchedulerName) -> None:
    def bright(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        return torch.full_like(noisy, 3.0) * torch.tensor([1, -1, 1, 0.1]).view(1, 4, 1, 1)

    objective = DdpmConfig(prediction="x0")
    clipped = draw(bright, objective, scheduler=scheduler, steps=6, clip=True)
    ends = torch.tensor([1, -1, 1, 0.3]).view(1, 4, 1, 1).expand_as(clipped)
    torch.testing.assert_close(clipped, ends, rtol=0, atol=1e-5)
    assert draw(bright, objective, scheduler=scheduler, steps=6).max() > 2.5


def test_ddim_goes_on_from_the_clamped_estimate() -> None:
    """Its noise is what explains the input with the estimate clamped, as Nichol & Dhariwal 2021 have it."""
    objective = DdpmConfig(prediction="epsilon")
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


# ---- the mean of the step before is predicted -----------------------------------------------------------


@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large", "learned", "learned_range"])
@pytest.mark.parametrize("timesteps", [12, 1000])
def test_a_predicted_mean_is_the_mean_of_the_step_whatever_is_clamped(timesteps: int, variance: Any) -> None:
    """Nichol & Dhariwal 2021's p(x_{t-1} | x_t) in float64: clamped estimates of x0 have no part in it."""
    objective = DdpmConfig(schedule="cosine", timesteps=timesteps, prediction="previous_x", variance=variance)

    def mean(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        output = network(noisy, time, label)
        # Ends around 3, where no image is; it contracts, so that roundings do not grow.
        means = 3 + 0.9 * (noisy - 3) + 0.01 * output[:, :4]
        return torch.cat([means, output[:, 4:] - 4 * (variance == "learned")], dim=1)

    found = draw(mean, objective, scheduler="ddpm", steps=timesteps, clip=True, seed=4)
    expected = ancestral(mean, objective, seed=4)
    assert expected.mean() > 1.2, "outside of where x0 is clamped to"
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


def ancestral(model: Any, objective: ObjectiveConfig, seed: int) -> Tensor:
    """All steps of the training back from noise, by the mean and the variance that the model gives itself."""
    beta = betas(objective)
    abar = torch.cumprod(1 - beta, 0)
    smallest = beta[1:] * (1 - abar[:-1]) / (1 - abar[1:])  # of the steps to 1, 2, ...; the last one has none
    generators = [_generator(seed, number) for number in range(len(LABELS))]

    def normal() -> Tensor:
        return torch.stack([torch.randn(SHAPE, generator=generator) for generator in generators]).double()

    x = normal()
    for t in reversed(range(len(beta))):
        mean, given = model(x.float(), torch.full((len(LABELS),), t), LABELS).double().chunk(2, dim=1)
        if t == 0:
            return mean
        small, large = smallest[t - 1].log(), beta[t].log()
        share = (given + 1) / 2
        logarithm = {
            "fixed_small": small,
            "fixed_large": large,
            "learned": given,
            "learned_range": share * large + (1 - share) * small,
        }[objective.variance]
        x = mean + (0.5 * logarithm).exp() * normal()
    raise AssertionError("no steps")


def test_where_x0_is_needed_it_is_clamped() -> None:
    """In steps longer than that whose mean is predicted, and by the other solvers in all."""
    objective = DdpmConfig(schedule="cosine", timesteps=20, prediction="previous_x")
    schedule = Schedule.build(objective, "cpu", torch.float64)

    def bright(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        of_clean, of_noisy = (
            table[time].view(-1, 1, 1, 1) for table in (schedule.posterior_clean, schedule.posterior_noisy)
        )
        return of_clean * 3.0 + of_noisy * noisy.double()  # x0 is 3

    for scheduler, steps in product(SCHEDULERS, (5, 20)):
        images = draw(bright, objective, scheduler=scheduler, steps=steps, clip=True)
        end = 3.0 if (scheduler, steps) == ("ddpm", 20) else 1.0
        torch.testing.assert_close(images, torch.full_like(images, end), rtol=0, atol=1e-3)


# ---- classes that are drawn -----------------------------------------------------------------------------


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
    sample(spy, DdpmConfig(), {"label": labels}, SamplerConfig(steps=1), shape=(1, 1, 1), null={}, batch=2000)
    correlation = torch.corrcoef(torch.stack([labels.float(), seen[0]]))[0, 1]
    assert abs(correlation) < 4 / 2000**0.5
