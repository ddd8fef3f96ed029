"""EDM's preconditioning: against the denoiser of the paper in float64 NumPy, and against diffusers'."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.objective import Objective
from fastdiff.objective_config import DiffusionConfig
from fastdiff.randomness import Stream, normal

SEED = 4
SHAPE = (4, 6, 6)
SIGMAS = torch.cat([torch.tensor([0.002, 80.0]), torch.logspace(-2.5, 2, 19)])


def objective(**options: Any) -> Objective:
    return Objective(DiffusionConfig(process="edm", condition_dropout=0, **options), seed=SEED, null={}, device="cpu")


def batch_of(size: int, scale: float) -> Batch:
    latents = scale * torch.randn(size, *SHAPE, generator=torch.Generator().manual_seed(size))
    return Batch(latents, torch.arange(30, 30 + size), {})


def guess_of(size: int) -> Tensor:
    return torch.randn(size, *SHAPE, generator=torch.Generator().manual_seed(1))


def of_gamma(weighting: str, gamma: float, sigma: np.ndarray, data: float) -> Any:
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
    corruption = ours.corrupt(batch, SIGMAS)
    found = ours.loss(guess, batch, corruption).double().numpy()

    clean, sigma = batch.latents.double().numpy(), SIGMAS.double().numpy()[:, None, None, None]
    x = clean + sigma * normal(SEED, Stream.NOISE, batch.position, SHAPE).double().numpy()
    c_skip = data**2 / (sigma**2 + data**2)
    c_out = sigma * data / np.sqrt(sigma**2 + data**2)
    c_in = 1 / np.sqrt(sigma**2 + data**2)
    denoised = c_skip * x + c_out * guess.double().numpy()
    weight = of_gamma(weighting, gamma or 0.0, sigma, data)
    expected = (weight * (denoised - clean) ** 2).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(corruption.noisy, c_in * x, rtol=0, atol=3e-6)
    np.testing.assert_allclose(corruption.time, np.log(sigma.flatten()) / 4, rtol=1e-6, atol=1e-7)
    assert corruption.time.dtype == torch.float32


def test_soft_min_snr_of_gamma_1_is_that_of_k_diffusion() -> None:
    """(sigma data)^2 / (sigma^2 + data^2)^2 for the error of F, and data^2 / (sigma^2 + data^2) without the clamp."""
    levels = objective(weighting="soft_min_snr", min_snr_gamma=1.0, sigma_data=0.7).process.levels(SIGMAS)
    sigma = SIGMAS.double()
    expected = (sigma * 0.7) ** 2 / (sigma**2 + 0.7**2) ** 2
    torch.testing.assert_close(levels.weights.double(), expected, rtol=1e-5, atol=0)
    clamped = objective(weighting="min_snr", min_snr_gamma=1e9, sigma_data=0.7).process.levels(SIGMAS)
    torch.testing.assert_close(clamped.weights.double(), 0.7**2 / (sigma**2 + 0.7**2), rtol=1e-5, atol=0)


def test_the_preconditioning_is_that_of_diffusers() -> None:
    from diffusers import EDMEulerScheduler

    scheduler = EDMEulerScheduler(sigma_data=0.5)
    ours, batch, guess = objective(), batch_of(len(SIGMAS), 0.5), guess_of(len(SIGMAS))
    corruption = ours.corrupt(batch, SIGMAS)
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


def test_the_log_of_sigma_is_normal_and_sigma_ascends_with_its_share() -> None:
    process = objective().process
    share = (torch.arange(20_000) + 0.5) / 20_000
    sigma = process.draw(share)
    assert (sigma.diff() > 0).all()
    assert stats.kstest(sigma.double().log().numpy(), stats.norm(-1.2, 1.2).cdf).statistic < 1e-4
    levels = process.levels(sigma)
    torch.testing.assert_close(levels.depth, share, rtol=0, atol=1e-5)
    torch.testing.assert_close(levels.log_snr, 2 * (0.5 / sigma).log(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighting", ["none", "min_snr", "soft_min_snr"])
def test_nothing_that_is_drawn_is_infinite(weighting: Any) -> None:
    process = objective(weighting=weighting).process
    levels = process.levels(process.draw(torch.tensor([0.0, 2.0**-32, 1 - 2.0**-24])))
    for value in (levels.time, levels.table, levels.weights, levels.log_snr, levels.depth):
        assert value.isfinite().all()
    assert (levels.weights > 0).all()
    assert levels.depth.min() >= 0
    assert levels.depth.max() <= 1


def test_a_perfect_network_has_no_loss_at_any_sigma() -> None:
    ours, batch = objective(sigma_data=1.3), batch_of(len(SIGMAS), 1.3)
    corruption = ours.corrupt(batch, SIGMAS)
    sigma = SIGMAS.double().view(-1, 1, 1, 1)
    clean, noise = batch.latents.double(), normal(SEED, Stream.NOISE, batch.position, SHAPE).double()
    total = sigma**2 + 1.3**2
    perfect = (clean - 1.3**2 / total * (clean + sigma * noise)) * total.sqrt() / (1.3 * sigma)
    assert ours.loss(perfect.float(), batch, corruption).max() < (64 * 2.0**-24) ** 2
    assert math.isclose(perfect.var(), 1, rel_tol=0.1), "the target has the variance that the paper asks for"
