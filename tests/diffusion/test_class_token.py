"""The class token of a teacher in the objective: noise, target and loss against the equations in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError
from fastdiff.rng import Stream, normal

SEED, WIDTH = 3, 10
SHAPE = (4, 3, 3)
POSITION = torch.arange(40, 46)
T = torch.tensor([0.02, 0.2, 0.4, 0.6, 0.8, 0.99])
"""Noise levels, 1 being noise."""
WITH_TOKEN = DiTConfig(depth=1, hidden=16, heads=2, patch=1, size=3, channels=4, classes=2, teacher_width=WIDTH)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    condition = {
        "label": torch.arange(6) % 2,
        "teacher_token": torch.randn(6, WIDTH, generator=generator),
        "time_ids": torch.zeros(6, 6),
    }
    return Batch(torch.randn(6, *SHAPE, generator=generator), POSITION, condition)


def objective(config: FlowConfig, inputs: tuple[str, ...] = ("label", "teacher_token")) -> Objective:
    return Objective(config, seed=SEED, null={"label": torch.tensor(2)}, device="cpu", inputs=inputs)


def predictions() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(6, *SHAPE, generator=generator).requires_grad_()
    return latents, torch.randn(6, WIDTH, generator=generator).requires_grad_()


def exact_loss(config: FlowConfig, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The noisy token, and the losses of latents and token: the mean square of the error of the velocity."""
    given, losses = batch(), []
    noises = normal(SEED, Stream.NOISE, POSITION, SHAPE), normal(SEED, Stream.TEACHER_TOKEN, POSITION, (WIDTH,))
    cleans = given.latents, given.condition["teacher_token"]
    for clean, noise, output in zip(cleans, noises, outputs, strict=True):
        x, e, out = (value.double().flatten(1) for value in (clean, noise, output))
        t = T.double()[:, None]
        z = (1 - t) * x + t * e
        if config.predicted == "x0":  # target and prediction are divided by at least 0.05
            error = (x - z) / t.clamp(min=0.05) - (out - z) / t.clamp(min=0.05)
        else:
            error = out - {"sit": x - e}.get(config.convention, e - x)
        losses.append(error.square().mean(1))
    return z, losses[0], losses[1]


@pytest.mark.parametrize("convention", ["sd3", "sit", "repa"])
@pytest.mark.parametrize("prediction", ["flow", "x0"])
def test_noise_and_loss_are_those_of_the_equations(convention: Any, prediction: Any) -> None:
    """RiT: x0 in SiT's time; SR-DiT: the velocity in REPA's."""
    config = FlowConfig(convention=convention, prediction=prediction, teacher_weight=0.2)
    made, given, outputs = objective(config), batch(), predictions()
    corruption = made.add_noise(given, native=T)
    noisy, of_latents, of_token = exact_loss(config, outputs)
    torch.testing.assert_close(corruption.condition["teacher_token"].double(), noisy, rtol=1e-6, atol=1e-6)
    assert corruption.condition.keys() == {"label", "teacher_token"}

    losses, exact = made.loss(outputs, given, corruption), of_latents + 0.2 * of_token
    torch.testing.assert_close(losses.double(), exact, rtol=1e-5, atol=0)
    assert made.part_names == ("loss_latents", "loss_teacher")
    for part, expected in zip(made.parts, (of_latents, 0.2 * of_token), strict=True):
        torch.testing.assert_close(part.double(), expected.detach(), rtol=1e-5, atol=0)
    ours = torch.autograd.grad(losses.sum(), outputs)
    for gradient, expected in zip(ours, torch.autograd.grad(exact.sum(), outputs), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    plain = made.squared_error(outputs, given, corruption, corruption.levels.weights)
    torch.testing.assert_close(plain.double(), of_latents, rtol=1e-5, atol=0)


def test_a_column_of_the_data_is_no_input_of_a_network_without_the_token() -> None:
    corruption = objective(FlowConfig(), inputs=("label",)).add_noise(batch(), native=T)
    assert corruption.condition.keys() == {"label"}


def test_the_token_has_its_own_noise_and_the_one_of_its_position() -> None:
    made, given = objective(FlowConfig(teacher_weight=1.0)), batch()
    whole = made.add_noise(given, native=torch.ones(6)).condition["teacher_token"]
    assert torch.equal(whole, normal(SEED, Stream.TEACHER_TOKEN, POSITION, (WIDTH,)))
    assert (whole - normal(SEED, Stream.NOISE, POSITION, (WIDTH,))).abs().min() > 1e-4
    half = Batch(given.latents[3:], POSITION[3:], {name: value[3:] for name, value in given.condition.items()})
    assert torch.equal(made.add_noise(half, native=torch.ones(3)).condition["teacher_token"], whole[3:])


def test_a_network_without_the_prediction_is_told() -> None:
    made, given, (latents, token) = objective(FlowConfig(teacher_weight=0.2)), batch(), predictions()
    corruption = made.add_noise(given, native=T)
    with pytest.raises(ValueError, match="predicts no class token of a teacher"):
        made.loss(latents, given, corruption)
    with pytest.raises(ValueError, match=r"the class token has shape \(6, 9\), expected \(6, 10\)"):
        made.loss((latents, token[:, 1:]), given, corruption)


@pytest.mark.parametrize(
    ("model", "objective", "words"),
    [
        (WITH_TOKEN, FlowConfig(), "--model.teacher_width 10 needs .*; given flow and 0"),
        (WITH_TOKEN, DdpmConfig(), "--model.teacher_width 10 needs --objective.process flow and .*; given ddpm and 0"),
        (
            replace(WITH_TOKEN, teacher_width=0),
            FlowConfig(teacher_weight=0.2),
            "--objective.teacher_weight 0.2 needs --model.teacher_width, .*: the network predicts no class token",
        ),
    ],
)
def test_network_and_objective_have_the_token_together(model: ModelConfig, objective: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig(model=model, objective=objective)


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--objective.teacher_weight -1.0: a finite number, at least 0"):
        FlowConfig(teacher_weight=-1.0)
