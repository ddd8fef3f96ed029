"""Sampling with the best possible denoiser, against exact solutions."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig, ObjectiveConfig
from fastdiff.config.sections.sampler import SamplerConfig, SchedulerName
from fastdiff.errors import ConfigError
from fastdiff.models.build import build_model
from fastdiff.models.dit.network import DiT
from fastdiff.sampling.solvers import sample
from tests.support.references.gaussian import CONFIG, MEANS, Gaussian, draw

SCHEDULERS: tuple[SchedulerName, ...] = ("ddim", "dpmsolver++", "ddpm")
PREDICTIONS: tuple[Literal["epsilon", "v", "x0"], ...] = ("epsilon", "v", "x0")


def trained() -> DiT:
    model = build_model(CONFIG)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


OBJECTIVE = DdpmConfig(schedule="linear", prediction="v")
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 2])


# ---- exact solutions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "cosine"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_one_point_is_recovered(scheduler: SchedulerName, prediction: Any, schedule: Any) -> None:
    # 7 and 30 steps do not divide 1000: the noise levels must still be those that the model is told.
    objective = DdpmConfig(schedule=schedule, prediction=prediction)
    for steps in (1, 7, 30):
        images = draw(Gaussian(objective, 0.0), objective, LABELS, scheduler=scheduler, steps=steps)
        expected = MEANS[LABELS].view(-1, 1, 1, 1).expand_as(images)
        torch.testing.assert_close(images, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize(("scheduler", "steps", "tolerance"), [("ddim", 640, 0.02), ("dpmsolver++", 100, 0.005)])
def test_deterministic_solvers_follow_the_probability_flow(
    scheduler: SchedulerName, steps: int, tolerance: float, prediction: Any
) -> None:
    # For a Gaussian the flow (Song et al. 2021) is linear: it keeps the distance from the mean in deviations.
    objective = DdpmConfig(schedule="linear", prediction=prediction)
    oracle = Gaussian(objective, 0.4)
    images = draw(oracle, objective, LABELS, scheduler=scheduler, steps=steps, seed=5)
    start = _first_input(objective, seed=5)
    end = oracle.alpha_bar[-1]
    mean = MEANS[LABELS].double().view(-1, 1, 1, 1)
    deviations = (start - end.sqrt() * mean) / (end * 0.4**2 + 1 - end).sqrt()
    assert (images - (mean + 0.4 * deviations)).abs().max() < tolerance


def test_ancestral_sampling_has_the_right_spread() -> None:
    objective = DdpmConfig(schedule="linear", prediction="epsilon")
    labels = torch.ones(600, dtype=torch.int64)
    images = draw(Gaussian(objective, 0.6), objective, labels, scheduler="ddpm", steps=500, batch=600)
    assert images.mean() == pytest.approx(float(MEANS[1]), abs=0.01)
    assert images.std() == pytest.approx(0.6, rel=0.03)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("prediction", ["v", "x0"])
def test_zero_terminal_snr(scheduler: SchedulerName, prediction: Any) -> None:
    objective = DdpmConfig(schedule="scaled_linear", prediction=prediction, zero_terminal_snr=True)
    oracle = Gaussian(objective, 0.6)
    images = draw(oracle, objective, LABELS.repeat(40), scheduler=scheduler, steps=500, batch=300)
    assert oracle.times[0] == 999
    deviations = (images - MEANS[LABELS.repeat(40)].view(-1, 1, 1, 1)) / 0.6
    assert deviations.mean() == pytest.approx(0, abs=0.05)
    assert deviations.std() == pytest.approx(1, rel=0.03)


def test_zero_terminal_snr_with_epsilon_is_refused() -> None:
    objective = DdpmConfig(prediction="epsilon", zero_terminal_snr=True)
    with pytest.raises(ConfigError, match=r"--objective.prediction v or x0"):
        draw(Gaussian(OBJECTIVE, 0.0), objective, LABELS)


# ---- the images are a function of (seed, number, label) --------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_images_do_not_depend_on_the_split(scheduler: SchedulerName) -> None:
    model = trained()
    options: Any = {"scheduler": scheduler, "steps": 6, "cfg": 2.0, "seed": 3}
    whole = draw(model, OBJECTIVE, LABELS, batch=7, **options)
    for batch in (1, 3):
        torch.testing.assert_close(draw(model, OBJECTIVE, LABELS, batch=batch, **options), whole, rtol=1e-4, atol=1e-4)
    second = draw(model, OBJECTIVE, LABELS[4:], first_index=4, **options)
    torch.testing.assert_close(second, whole[4:], rtol=1e-4, atol=1e-4)
    twins = draw(model, OBJECTIVE, LABELS[:1].repeat(2), **options)
    assert not torch.allclose(twins[0], twins[1], atol=0.1)
    assert not torch.allclose(draw(model, OBJECTIVE, LABELS, **{**options, "seed": 4}), whole, atol=0.1)


def test_global_random_state_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draw(trained(), OBJECTIVE, LABELS, scheduler="ddpm", steps=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(draw(trained(), OBJECTIVE, LABELS, scheduler="ddpm", steps=3), first)


def test_initial_noise_is_standard_normal_and_its_own_for_every_image() -> None:
    noise = _first_input(OBJECTIVE, seed=-1, labels=torch.zeros(400, dtype=torch.int64)).flatten(1)
    assert noise.mean() == pytest.approx(0, abs=0.03)
    assert noise.std() == pytest.approx(1, abs=0.03)
    assert len(torch.unique(noise[:, 0])) == 400


# ---- guidance ------------------------------------------------------------------------------------------


def test_guidance_is_linear_and_keeps_the_order() -> None:
    # One point per class: x0 of the model is MEANS[class], so the guided one is null + cfg * (class - null).
    objective = DdpmConfig(prediction="x0")
    oracle = Gaussian(objective, 0.0)
    images = draw(oracle, objective, LABELS, steps=4, cfg=3.0, batch=4)
    torch.testing.assert_close(images, (3 * MEANS[LABELS]).view(-1, 1, 1, 1).expand_as(images), atol=1e-4, rtol=0)
    assert len(oracle.calls) == 2 * 4
    assert oracle.calls[0].tolist() == [0, 1, 2, 0, 3, 3, 3, 3]


def test_guidance_of_one_is_no_guidance_at_half_the_cost() -> None:
    oracle = Gaussian(OBJECTIVE, 0.3)
    plain = draw(oracle, OBJECTIVE, LABELS, steps=4, cfg=None)
    assert torch.equal(draw(oracle, OBJECTIVE, LABELS, steps=4, cfg=1.0), plain)
    assert [call.tolist() for call in oracle.calls] == [LABELS.tolist()] * 8
    nearly = draw(oracle, OBJECTIVE, LABELS, steps=4, cfg=1.0 + 1e-6)
    torch.testing.assert_close(nearly, plain, rtol=0, atol=1e-4)


def test_guidance_of_zero_is_the_null_class() -> None:
    oracle = Gaussian(OBJECTIVE, 0.3)
    null = torch.full_like(LABELS, CONFIG.classes)
    zero = draw(oracle, OBJECTIVE, LABELS, steps=4, cfg=0.0)
    torch.testing.assert_close(zero, draw(oracle, OBJECTIVE, null, steps=4), rtol=0, atol=1e-5)


def test_guidance_replaces_every_input_that_has_a_null_and_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    condition = {
        "context": torch.randn(3, 5, 6, generator=generator).bfloat16(),
        "context_mask": torch.tensor([[True] * n + [False] * (5 - n) for n in (1, 3, 5)]),
        "pooled": torch.randn(3, 4, generator=generator).bfloat16(),
        "time_ids": torch.rand(3, 6, generator=generator),
    }
    null = {"context": torch.full((5, 6), 0.125), "pooled": torch.full((4,), -0.5)}
    null["context_mask"] = torch.tensor([True, True, False, False, False])
    seen: list[dict[str, Tensor]] = []

    def model(noisy: Tensor, time: Tensor, **given: Tensor) -> Tensor:
        seen.append(given)
        return torch.zeros_like(noisy)

    options: Any = {"shape": (2, 4, 6), "null": null}
    assert sample(model, OBJECTIVE, condition, SamplerConfig(cfg=2.0, steps=1), **options).shape == (3, 2, 4, 6)
    for name, value in condition.items():
        given, without = seen[0][name].chunk(2)
        assert seen[0][name].dtype == value.dtype
        assert torch.equal(given, value)
        expected = null[name].to(value.dtype).expand_as(value) if name in null else value
        assert torch.equal(without, expected)
    sample(model, OBJECTIVE, condition, SamplerConfig(steps=1), batch=2, **options)
    assert [len(given["pooled"]) for given in seen] == [6, 2, 1]
    for name, value in condition.items():
        assert torch.equal(torch.cat([given[name] for given in seen[1:]]), value)


# ---- the rest ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_learned_variance_is_ignored(scheduler: SchedulerName) -> None:
    class Doubled(Gaussian):
        def __call__(self, noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
            assert noisy.shape[1] == CONFIG.channels
            prediction = super().__call__(noisy, time, label)
            return torch.cat([prediction, torch.full_like(prediction, 1e9)], dim=1)

    options: Any = {"scheduler": scheduler, "steps": 5, "cfg": 1.5}
    plain = draw(Gaussian(OBJECTIVE, 0.2), OBJECTIVE, LABELS, **options)
    assert torch.equal(draw(Doubled(OBJECTIVE, 0.2), OBJECTIVE, LABELS, **options), plain)


def test_bf16_model_gives_fp32_images() -> None:
    images = draw(trained().bfloat16(), OBJECTIVE, LABELS, steps=3, cfg=1.5)
    assert images.dtype == torch.float32
    assert images.shape == (7, 2, 4, 4)
    assert not images.requires_grad


def test_images_are_not_clipped() -> None:
    objective = DdpmConfig(prediction="x0")
    for scheduler in SCHEDULERS:
        images = draw(Gaussian(objective, 0.0), objective, LABELS[:3], scheduler=scheduler, steps=5, cfg=9.0)
        assert float(images.max()) == pytest.approx(9 * 0.75, abs=0.01)


def test_no_labels_no_images() -> None:
    assert draw(trained(), OBJECTIVE, LABELS[:0]).shape == (0, 2, 4, 4)


def test_unknown_scheduler_names_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'euler'.*ddim, dpmsolver\+\+, ddpm"):
        draw(trained(), OBJECTIVE, LABELS, scheduler="euler")  # type: ignore[arg-type]


class _Silent:
    """Predicts 0."""

    config = CONFIG

    def __call__(self, noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        return torch.zeros_like(noisy)


def _first_input(objective: ObjectiveConfig, seed: int, labels: Tensor = LABELS) -> Tensor:
    """The noise that the model is given first."""
    seen: list[Tensor] = []

    class Spy(_Silent):
        def __call__(self, noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
            seen.append(noisy.clone())
            return super().__call__(noisy, time, label)

    draw(Spy(), objective, labels, steps=1, seed=seed, batch=len(labels))
    return seen[0].double()
