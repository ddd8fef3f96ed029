"""Loss weights by timestep: their effect on the error of x0, and their limits."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from fastdiff.batch import Batch
from fastdiff.config.sections.objective import DdpmConfig, ScheduleName
from fastdiff.diffusion.levels import SnrWeighting, loss_weights
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.schedules import Schedule
from fastdiff.errors import ConfigError
from fastdiff.rng import Stream, normal

PREDICTIONS = ("epsilon", "v", "x0", "flow")
KINDS = [kind for kind in get_args(SnrWeighting) if kind != "none"]
OF_X0 = {
    "min_snr": lambda snr, gamma: min(snr, gamma),
    "soft_min_snr": lambda snr, gamma: snr * gamma / (snr + gamma),
    "p2": lambda snr, gamma: snr / (1 + snr) ** gamma,
    "debiased": lambda snr, gamma: math.sqrt(snr),
    "snr": lambda snr, gamma: snr,
}
"""Weight of the squared error of x0."""
USUAL = {"min_snr": 5.0, "soft_min_snr": 5.0, "p2": 1.0}


def errors(prediction, snr):
    """Squared errors of x0 and of the noise for an error of 1 in a prediction of the same noisy latents."""
    flow = prediction == "flow"
    sigma = 1 / (1 + math.sqrt(snr)) if flow else 1 / math.sqrt(1 + snr)
    alpha = math.sqrt(snr) * sigma
    noise = -alpha / sigma  # for an error of 1 in x0: alpha * 1 + sigma * noise = 0
    predicted = {"epsilon": noise, "v": alpha * noise - sigma, "x0": 1.0, "flow": noise - 1.0}[prediction]
    return 1 / predicted**2, (noise / predicted) ** 2


def noise_per_error(prediction, snr):
    """In closed form, 0 included."""
    return {
        "epsilon": torch.ones_like(snr),
        "v": snr / (snr + 1),
        "x0": snr,
        "flow": snr / (1 + snr.sqrt()) ** 2,
    }[prediction]


def linear_schedule(zero_terminal):
    """Running product of 1 - beta in float64 NumPy: Ho et al. 2020, and Lin et al. 2023, algorithm 1."""
    abar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    if zero_terminal:
        root = np.sqrt(abar)
        abar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    return abar


def tables(config):
    """The fp32 weights that the loss gathers from, and the fp64 signal-to-noise ratios."""
    weights = Objective(config, seed=0, null={}, device="cpu").process.weights
    return weights, Schedule.build(config, "cpu", torch.float64).snr


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gamma", [None, 0.7])
def test_a_weighting_means_the_same_for_every_prediction(kind, prediction, gamma):
    snr = torch.logspace(-6, 5, 89, dtype=torch.float64)
    of_noise = torch.tensor([errors(prediction, ratio)[1] for ratio in snr.tolist()], dtype=torch.float64)
    torch.testing.assert_close(of_noise, noise_per_error(prediction, snr), rtol=1e-10, atol=0)
    weights = loss_weights(kind, snr, of_noise, gamma)
    assert weights.dtype == torch.float64
    for weight, ratio in zip(weights.tolist(), snr.tolist(), strict=True):
        expected = OF_X0[kind](ratio, USUAL.get(kind) if gamma is None else gamma)
        assert weight == pytest.approx(expected * errors(prediction, ratio)[0], rel=1e-10)


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_without_signal_is_its_limit(kind, prediction):
    snr = torch.tensor([0.0, 1e-30], dtype=torch.float64)
    weight, close = loss_weights(kind, snr, noise_per_error(prediction, snr)).tolist()
    if (kind, prediction) == ("debiased", "epsilon"):
        assert weight == 0.0, "the one without a limit: that of the weighted error of x0"
    else:
        assert weight == pytest.approx(close, abs=1e-14)
    assert weight == (1.0 if prediction == "epsilon" and kind != "debiased" else 0.0)


@pytest.mark.parametrize("kind", get_args(SnrWeighting))
@pytest.mark.parametrize("prediction", PREDICTIONS[:3])
def test_weights_are_finite_under_zero_terminal_snr(kind, prediction):
    for schedule in get_args(ScheduleName):
        config = DdpmConfig(schedule=schedule, prediction=prediction, weighting=kind, zero_terminal_snr=True)
        weights, snr = tables(config)
        assert snr[-1] == 0
        assert weights.isfinite().all()
        assert (weights[:-1] > 0).all()
        expected = loss_weights(kind, snr, noise_per_error(prediction, snr)).float()
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("zero_terminal", [False, True])
@pytest.mark.parametrize("kind", get_args(SnrWeighting))
@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0", "previous_x"])
def test_the_loss_is_that_of_the_papers(kind, prediction, zero_terminal):
    if prediction == "previous_x" and kind != "none":
        with pytest.raises(ConfigError, match=r"with --objective\.prediction previous_x: "):
            DdpmConfig(prediction=prediction, weighting=kind)
        return
    config = DdpmConfig(prediction=prediction, weighting=kind, zero_terminal_snr=zero_terminal)
    objective = Objective(config, seed=1, null={}, device="cpu")
    time = torch.tensor([0, 1, 60, 250, 500, 750, 998, 999])
    batch = Batch(torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8), {})
    guess = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    corruption = objective.add_noise(batch, native=time)
    found = objective.loss(guess, batch, corruption).double().numpy()

    whole = linear_schedule(zero_terminal)
    before = np.concatenate([[1.0], whole[:-1]])[time][:, None, None, None]
    abar = whole[time][:, None, None, None]
    alpha, sigma, beta = np.sqrt(abar), np.sqrt(1 - abar), 1 - abar / before
    clean, noise = batch.latents.double().numpy(), normal(1, Stream.NOISE, batch.position, (4, 5, 5)).double().numpy()
    noisy = alpha * clean + sigma * noise
    np.testing.assert_allclose(corruption.noisy, noisy, rtol=0, atol=2e-6)
    target = {
        "epsilon": noise,
        "v": alpha * noise - sigma * clean,
        "x0": clean,
        "previous_x": (np.sqrt(before) * beta * clean + np.sqrt(abar / before) * (1 - before) * noisy) / (1 - abar),
    }[prediction]
    squared = ((guess.double().numpy() - target) ** 2).mean(axis=(1, 2, 3))
    expected = squared * [1.0 if kind == "none" else weight_of(kind, prediction, r) for r in (abar / (1 - abar)).flat]
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-30)


def weight_of(kind, prediction, snr):
    """The weight of x0 divided by the factor between the errors; without signal, its limit."""
    if snr == 0 and prediction == "epsilon":
        return 0.0 if kind == "debiased" else 1.0
    return OF_X0[kind](snr, USUAL.get(kind)) / {"epsilon": snr, "v": snr + 1, "x0": 1.0}[prediction]


def test_the_gamma_of_the_configuration_is_used():
    for kind in ("auto", "min_snr", "soft_min_snr"):
        weights, snr = tables(DdpmConfig(weighting=kind, min_snr_gamma=2.5))
        expected = loss_weights("min_snr" if kind == "auto" else kind, snr, torch.ones_like(snr), 2.5)
        assert torch.equal(weights, expected.float())


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("zero_terminal", [False, True])
def test_p2_has_the_exponent_of_the_configuration(zero_terminal, gamma):
    """Choi et al. 2022, eq. 8: 1 / (k + snr)^gamma for the error of the noise; k is 1, and 1 + snr 1 / (1 - abar)."""
    abar = linear_schedule(zero_terminal)
    of_noise = (1 - abar) ** gamma
    expected = {"epsilon": of_noise, "v": of_noise * abar, "x0": of_noise * abar / (1 - abar)}
    for prediction, weights in expected.items():
        options = {"weighting": "p2", "p2_gamma": gamma, "zero_terminal_snr": zero_terminal}
        found, _ = tables(DdpmConfig(prediction=prediction, **options))
        np.testing.assert_allclose(found, weights, rtol=1e-6, atol=1e-12)
