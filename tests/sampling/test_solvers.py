"""Sampling with the best possible denoiser, against exact solutions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig, ObjectiveConfig
from fastdiff.config.sections.sampler import SamplerConfig, SchedulerName
from fastdiff.models.build import build_model
from fastdiff.models.dit.network import DiT
from fastdiff.sampling.solvers import sample
from tests.support.references.gaussian import CONFIG, MEANS, Gaussian, draw

SCHEDULERS: tuple[SchedulerName, ...] = ("ddim", "dpmsolver++", "ddpm")


def trained() -> DiT:
    model = build_model(CONFIG)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


OBJECTIVE = DdpmConfig(schedule="linear", prediction="v")
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 2])


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


def test_bf16_model_gives_fp32_images() -> None:
    images = draw(trained().bfloat16(), OBJECTIVE, LABELS, steps=3, cfg=1.5)
    assert images.dtype == torch.float32
    assert images.shape == (7, 2, 4, 4)
    assert not images.requires_grad


def test_no_labels_no_images() -> None:
    assert draw(trained(), OBJECTIVE, LABELS[:0]).shape == (0, 2, 4, 4)


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
