"""Every loss with a variational bound, and its gradient, against float64 NumPy."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.variational import Variational, log_probability
from fastdiff.parallel.world import World
from fastdiff.rng import Stream, normal
from fastdiff.training.loop import train
from tests.support.references.variational_reference import (
    Reference,
    bin_log_probability,
    cosine_betas,
    jsd_betas,
    linear_betas,
    zero_terminal_betas,
)
from tests.support.runs import launch, losses, newest, tiny

LOSSES = ("mse", "rescaled_mse", "kl", "rescaled_kl")
LEARNED = ("learned", "learned_range")
VARIANCES = ("fixed_small", "fixed_large", *LEARNED)
PREDICTIONS = ("epsilon", "x0", "previous_x", "v")
SHAPE = (2, 4, 4)
SCHEDULES = {(50, "cosine"): cosine_betas, (1000, "linear"): linear_betas, (4000, "cosine"): cosine_betas}
TO_NOISE = {(200, "jsd"): jsd_betas, (300, "linear to 0"): zero_terminal_betas}
"""Nothing of the data is left at their last step, of which the bound is infinite if the noise is predicted."""
CASES = [*itertools.product(PREDICTIONS, SCHEDULES), *itertools.product(PREDICTIONS[1:], TO_NOISE)]


class Case:
    """An objective, a batch at chosen timesteps and predictions from far to near, with the same in NumPy."""

    def __init__(self, timesteps: int = 1000, schedule: str = "linear", **options: Any) -> None:
        options |= {"schedule": schedule.removesuffix(" to 0"), "zero_terminal_snr": schedule.endswith(" to 0")}
        self.config = DdpmConfig(timesteps=timesteps, condition_dropout=0, **options)
        self.objective = Objective(self.config, seed=3, null={}, device="cpu")
        betas = (SCHEDULES | TO_NOISE)[timesteps, schedule](timesteps)
        self.reference = Reference(betas, self.config.predicted, self.config.variance)
        times = [0, 1, 2, timesteps // 3, timesteps - 2, timesteps - 1]
        self.time = torch.tensor(times).repeat_interleave(4)
        generator = torch.Generator().manual_seed(1)
        clean = (0.8 * torch.randn(len(self.time), *SHAPE, generator=generator)).clamp(-1, 1)
        clean[..., 0, :] = torch.tensor([0.993, -0.993, 0.9985, -0.9985])  # near the outermost bins, but not of them
        self.batch = Batch(clean, torch.arange(len(clean)) + 40, {})
        self.noise = normal(3, Stream.NOISE, self.batch.position, SHAPE).double().numpy()
        self.clean, self.numbers = clean.double().numpy(), self.time.numpy()
        target = torch.from_numpy(self.reference.target(self.clean, self.noise, self.numbers))
        self.error = np.tile([1.0, 0.1, 0.02, 0.004], len(times))
        output = target + torch.from_numpy(self.error).view(-1, 1, 1, 1) * torch.randn(
            target.shape, generator=generator
        )
        given = 3 * torch.rand(target.shape, generator=generator) - 1.5
        if self.config.variance == "learned":
            given = given + torch.from_numpy(np.log(self.reference.clipped))[self.time].view(-1, 1, 1, 1)
        self.prediction = torch.cat([output, given] if self.config.learns_variance else [output], dim=1).float()

    def loss(self, prediction: Tensor) -> Tensor:
        return self.objective.loss(prediction, self.batch, self.objective.add_noise(self.batch, native=self.time))

    def expected(self, prediction: np.ndarray, frozen: np.ndarray | None = None) -> np.ndarray:
        """The loss in float64; ``frozen`` is the mean inside of the bound, where the squared error is added to it."""
        output, given = np.split(prediction, 2, axis=1) if self.config.learns_variance else (prediction, prediction)
        known = self.clean, self.noise, self.numbers
        timesteps, kind = self.config.timesteps, self.config.loss
        if "kl" in kind:
            return self.reference.bits(output, given, *known) * (timesteps if kind == "rescaled_kl" else 1)
        loss = ((output - self.reference.target(*known)) ** 2).mean(axis=(1, 2, 3))
        if not self.config.learns_variance:
            return loss
        bound = self.reference.bits(output if frozen is None else frozen, given, *known)
        return loss + bound * (timesteps / 1000 if kind == "rescaled_mse" else 1)


def gradient(case: Case, prediction: Tensor) -> Tensor:
    prediction = prediction.clone().requires_grad_()
    (found,) = torch.autograd.grad(case.loss(prediction).sum(), prediction)
    return found


@pytest.mark.parametrize(("prediction", "steps"), CASES, ids=str)
@pytest.mark.parametrize(("loss", "variance"), list(itertools.product(LOSSES, VARIANCES)))
def test_every_combination_agrees_with_the_equations(
    loss: str, variance: str, prediction: str, steps: tuple[int, str]
) -> None:
    case = Case(*steps, loss=loss, variance=variance, prediction=prediction)
    found = case.loss(case.prediction)
    assert found.dtype == torch.float32
    # Float64 knows a divergence of almost equal Gaussians to the rounding of the 1 and the logarithms in it.
    bound = 4e-16 * (case.config.timesteps if loss == "rescaled_kl" else 1)
    np.testing.assert_allclose(found.numpy(), case.expected(case.prediction.double().numpy()), rtol=1e-5, atol=bound)


@pytest.mark.parametrize(("prediction", "steps"), CASES, ids=str)
@pytest.mark.parametrize(("loss", "variance"), [*itertools.product(LOSSES, LEARNED), ("kl", "fixed_large")])
def test_the_gradient_agrees_with_the_equations(
    loss: str, variance: str, prediction: str, steps: tuple[int, str]
) -> None:
    """Of the mean and of the variance, each along random directions; inside of the hybrids the mean is constant."""
    case = Case(*steps, loss=loss, variance=variance, prediction=prediction)
    found, point = gradient(case, case.prediction).double().numpy(), case.prediction.double().numpy()
    frozen, bound = point[:, : SHAPE[0]], 4e-16 * case.config.timesteps
    direction = np.random.default_rng(0).standard_normal(point.shape)
    halves = [slice(0, SHAPE[0]), slice(SHAPE[0], None)] if case.config.learns_variance else [slice(None)]
    for half in halves:
        step = np.zeros_like(direction)
        step[:, half] = direction[:, half]
        slope = case.expected(point + 1e-30j * step, frozen).imag / 1e-30
        along = (found * step).sum(axis=(1, 2, 3))
        size = np.sqrt((found[:, half] ** 2).sum(axis=(1, 2, 3)))
        # The target is rounded to fp32, which is more of a small error than of a large one.
        assert (np.abs(along - slope) <= (1e-5 + 2.0**-22 / case.error) * size + bound).all()


@pytest.mark.parametrize("prediction", ["epsilon", "x0", "v"])
def test_a_weighting_weighs_the_squared_error_of_a_hybrid_only(prediction: str) -> None:
    options = {"prediction": prediction, "min_snr_gamma": 5.0}
    hybrid = Case(loss="rescaled_mse", variance="learned_range", **options)
    plain, channels = Case(**options), SHAPE[0]
    assert hybrid.objective.variational is not None
    noise = torch.from_numpy(hybrid.noise).float()
    bound = hybrid.objective.variational.loss(hybrid.prediction, hybrid.batch.latents, noise, hybrid.time)
    weighted = plain.loss(hybrid.prediction[:, :channels])
    assert not torch.equal(weighted, Case(prediction=prediction).loss(hybrid.prediction[:, :channels]))
    torch.testing.assert_close(hybrid.loss(hybrid.prediction), weighted + bound)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("variance", LEARNED)
def test_bf16_predictions_are_computed_in_fp32(loss: str, variance: str) -> None:
    case = Case(loss=loss, variance=variance)
    rounded = case.prediction.bfloat16()
    assert torch.equal(case.loss(rounded), case.loss(rounded.float()))
    found = gradient(case, rounded)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    assert torch.equal(found, gradient(case, rounded.float()).bfloat16())


@pytest.mark.parametrize("given", [-1e30, -1e4, -200.0, -90.0, 90.0, 200.0, 1e4, 1e30])
def test_a_branch_that_is_not_taken_has_no_gradient(given: float) -> None:
    """Log variances whose exponentials overflow in one term: at t = 0 in the divergence, at t > 0 in the decoder."""
    case = Case(loss="kl", variance="learned")
    prediction = case.prediction.clone()
    extreme = (case.time == 0) | (given > 0)
    prediction[extreme, SHAPE[0] :] = given
    assert case.loss(prediction).isfinite().all()
    found = gradient(case, prediction)
    assert found.isfinite().all()
    assert torch.equal(found[~extreme], gradient(case, case.prediction)[~extreme])


def test_a_perfect_prediction_of_the_posterior_has_no_divergence() -> None:
    case = Case(prediction="x0", loss="kl")
    bits = case.loss(case.batch.latents)
    assert (bits[case.time > 0] == 0).all()
    assert (bits[case.time == 0] > 0).all()


def test_probabilities_of_all_bins_add_to_one() -> None:
    """They are cut where the bins meet, so that the sum telescopes, whatever the cdf."""
    values = torch.linspace(-1, 1, 256, dtype=torch.float64)
    for mean, deviation in ((0.0, 0.3), (0.95, 0.1), (-3.0, 1.0), (0.3, 0.01)):
        log_variance = torch.full_like(values, 2 * float(np.log(deviation)))
        assert log_probability(values, values - mean, log_variance).exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_bin_probabilities_in_fp32_hold_in_the_tails() -> None:
    value = torch.linspace(-1, 1, 256).repeat(40, 1).double()
    mean = torch.linspace(-1.5, 1.5, 40).view(-1, 1).double()
    for log_variance in (-14.0, -11.0, -8.0, -3.0, 0.0):
        wide = torch.full_like(value, log_variance)
        found = log_probability(value.float(), (value - mean).float(), wide.float())
        expected = bin_log_probability(value.numpy(), mean.numpy(), wide.numpy())
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_no_host_synchronisation_and_tables_on_the_device_once() -> None:
    """On meta tensors nothing could be read back."""
    variational = Variational(DdpmConfig(loss="rescaled_mse", variance="learned_range"), "meta")
    half, time = torch.empty(4, *SHAPE, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    assert variational.loss(torch.cat([half, half], dim=1), half, half, time).shape == (4,)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_trains_mean_and_variance(world: World, digits: Any, tmp_path: Any, precision: str) -> None:
    objective = {"objective__variance": "learned_range", "objective__loss": "rescaled_mse"}
    changes = {"model__learn_sigma": True, "performance__precision": precision, **objective}
    train(tiny(digits, tmp_path, steps=3, **changes), launch(3), world)
    assert np.isfinite(losses(tmp_path)).all()
    weight = newest(tmp_path).weights(None)["final_layer.linear.weight"]
    mean, variance = weight.view(4, 2, -1).unbind(1)  # of each pixel of a patch; both start at 0
    assert mean.abs().sum() > 0
    assert variance.abs().sum() > 0
