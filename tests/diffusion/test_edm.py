"""EDM's preconditioning: against the denoiser of the paper in float64 NumPy, and against diffusers'."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.sections.objective import EdmConfig, Process
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.processes import build_process
from fastdiff.rng import Stream, normal
from tests.support.inputs.objectives import objective_of

SEED = 4
SHAPE = (4, 6, 6)
SIGMAS = torch.cat([torch.tensor([0.002, 80.0]), torch.logspace(-2.5, 2, 19)])


def objective(**options: Any) -> Objective:
    return Objective(EdmConfig(condition_dropout=0, **options), seed=SEED, null={}, device="cpu")


def batch_of(size: int, scale: float) -> Batch:
    latents = scale * torch.randn(size, *SHAPE, generator=torch.Generator().manual_seed(size))
    return Batch(latents, torch.arange(30, 30 + size), {})


def guess_of(size: int) -> Tensor:
    return torch.randn(size, *SHAPE, generator=torch.Generator().manual_seed(1))


def gamma_weight(weighting: str, gamma: float, sigma: np.ndarray, data: float) -> Any:
    """Weight of |D - y|^2; table 1 has (sigma^2 + data^2) / (sigma data)^2 for lambda."""
    snr = (data / sigma) ** 2
    plain = (sigma**2 + data**2) / (sigma * data) ** 2
    # The error of the noise is that of D over sigma.
    weights = {"none": plain, "min_snr": np.minimum(1, gamma / snr) / sigma**2}
    weights["soft_min_snr"] = gamma / (snr + gamma) / sigma**2
    return weights[weighting]


@pytest.mark.parametrize("data", [0.5, 0.9, 1.0])
@pytest.mark.parametrize(("weighting", "gamma"), [("none", None), ("min_snr", 5.0), ("soft_min_snr", 1.0)])
def test_the_loss_is_that_of_the_denoiser(weighting: Any, gamma: float | None, data: float) -> None:
    ours = objective(weighting=weighting, min_snr_gamma=gamma, sigma_data=data)
    batch, guess = batch_of(len(SIGMAS), data), guess_of(len(SIGMAS))
    corruption = ours.add_noise(batch, native=SIGMAS)
    found = ours.loss(guess, batch, corruption).double().numpy()

    clean, sigma = batch.latents.double().numpy(), SIGMAS.double().numpy()[:, None, None, None]
    x = clean + sigma * normal(SEED, Stream.NOISE, batch.position, SHAPE).double().numpy()
    c_skip = data**2 / (sigma**2 + data**2)
    c_out = sigma * data / np.sqrt(sigma**2 + data**2)
    c_in = 1 / np.sqrt(sigma**2 + data**2)
    denoised = c_skip * x + c_out * guess.double().numpy()
    weight = gamma_weight(weighting, gamma or 0.0, sigma, data)
    expected = (weight * (denoised - clean) ** 2).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(corruption.noisy, c_in * x, rtol=0, atol=3e-6)
    np.testing.assert_allclose(corruption.time, np.log(sigma.flatten()) / 4, rtol=1e-6, atol=1e-7)
    assert corruption.time.dtype == torch.float32


def test_the_preconditioning_is_that_of_diffusers() -> None:
    from diffusers import EDMEulerScheduler

    scheduler = EDMEulerScheduler(sigma_data=0.5)
    ours, batch, guess = objective(), batch_of(len(SIGMAS), 0.5), guess_of(len(SIGMAS))
    corruption = ours.add_noise(batch, native=SIGMAS)
    found = ours.loss(guess, batch, corruption)
    noise = normal(SEED, Stream.NOISE, batch.position, SHAPE)
    for n, sigma in enumerate(SIGMAS):
        x = batch.latents[n] + sigma * noise[n]
        torch.testing.assert_close(corruption.noisy[n], scheduler.precondition_inputs(x, sigma), rtol=0, atol=3e-6)
        torch.testing.assert_close(corruption.time[n], scheduler.precondition_noise(sigma), rtol=1e-6, atol=1e-6)
        if 0.01 < sigma < 20:  # its fp32 cancels beyond
            denoised = scheduler.precondition_outputs(x, guess[n], sigma)
            weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
            expected = weight * (denoised - batch.latents[n]).square().mean()
            torch.testing.assert_close(found[n], expected, rtol=2e-4, atol=0)


@pytest.mark.parametrize(("mean", "std"), [(None, None), (-0.4, 1.0), (0.8, 1.6), (None, 0.7), (0.0, None)])
def test_mean_and_std_of_the_run_are_those_of_sigma_and_of_its_depth(mean: float | None, std: float | None) -> None:
    config, position = TimestepConfig(mean=mean, std=std), torch.arange(2048)
    given = Objective(EdmConfig(), seed=SEED, null={}, device="cpu", timesteps=config)
    sigma = given.timesteps.draw(position)[0]
    normal_ = stats.norm(-1.2 if mean is None else mean, 1.2 if std is None else std)
    assert stats.kstest(sigma.double().log().numpy(), normal_.cdf).pvalue > 0.01
    depth = given.process.levels(sigma).depth
    np.testing.assert_allclose(depth, normal_.cdf(sigma.double().log().numpy()), rtol=0, atol=1e-5)
    assert (torch.bincount((4 * depth).long()) - 512).abs().max() < 4 * math.sqrt(2048 * 3 / 16), "quarters are even"


@pytest.mark.parametrize("data", [0.3, 0.5, 1.0])
def test_equal_noise_has_an_equal_log_snr_in_every_process(data: float) -> None:
    """Whatever the variance of the data: a bin of the log SNR holds the same levels in every run."""
    abar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    ratio = np.sqrt((1 - abar) / abar)
    natives: dict[Process, torch.Tensor] = {
        "ddpm": torch.arange(1000),
        "flow": torch.from_numpy(ratio / (1 + ratio)),
        "edm": torch.from_numpy(ratio),
    }
    for name, native in natives.items():
        options: Any = {"sigma_data": data} if name == "edm" else {}
        levels = build_process(objective_of(name, **options), "cpu").levels(native)
        np.testing.assert_allclose(levels.log_snr[levels.row], -2 * np.log(ratio), rtol=1e-5, atol=1e-5)
        alpha, sigma = levels.table[levels.row].double().unbind(1)[:2]
        np.testing.assert_allclose(sigma / alpha, ratio, rtol=1e-5)


@pytest.mark.parametrize("data", [1e-3, 0.5, 1e3])
@pytest.mark.parametrize(("mean", "std"), [(None, None), (-20.0, 10.0), (20.0, 10.0)])
@pytest.mark.parametrize("weighting", ["none", "min_snr", "soft_min_snr"])
def test_nothing_that_is_drawn_is_infinite(weighting: Any, mean: float | None, std: float | None, data: float) -> None:
    config = EdmConfig(weighting=weighting, sigma_data=data)
    process = build_process(config, "cpu", TimestepConfig(mean=mean, std=std))
    levels = process.levels(process.draw(torch.tensor([0.0, 2.0**-32, 0.5, 1 - 2.0**-24])))
    for value in (levels.time, levels.table, levels.weights, levels.log_snr, levels.depth):
        assert value.isfinite().all()
    assert (levels.weights >= 0).all()
    assert (levels.weights > 0).all() or mean is not None
    # The model sees noisy latents, and is asked for something, at whatever level.
    assert (levels.table[:, :2].norm(dim=1) > 0).all()
    assert (levels.table[:, 2:] * torch.tensor([data, 1.0])).norm(dim=1).sub(1).abs().max() < 1e-5
    assert levels.depth.min() >= 0
    assert levels.depth.max() <= 1
