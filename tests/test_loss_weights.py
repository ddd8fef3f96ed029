"""Weights of the loss by timestep: Min-SNR in closed form, and at its limits."""

import pytest
import torch

from fastdiff.config import DiffusionConfig
from fastdiff.objective import Objective, loss_weights
from fastdiff.schedule import Schedule


def _weights(config):
    """The fp32 table that the loss gathers from."""
    return Objective(config, seed=0, classes=10, device="cpu").weights


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "cosine"])
@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
def test_min_snr_weights_are_their_closed_form(schedule, prediction):
    config = DiffusionConfig(schedule=schedule, prediction=prediction, min_snr_gamma=5.0)
    snr = Schedule.build(config, "cpu", torch.float64).snr
    weights = loss_weights(config)
    for step in range(0, 1000, 37):
        clamped = min(float(snr[step]), 5.0)
        divisor = {"epsilon": float(snr[step]), "v": float(snr[step]) + 1, "x0": 1.0}[prediction]
        assert weights[step].item() == pytest.approx(clamped / divisor, rel=1e-14)
    assert torch.equal(_weights(config), weights.float())


@pytest.mark.parametrize(("prediction", "last"), [("epsilon", 1.0), ("v", 0.0), ("x0", 0.0)])
def test_min_snr_weights_are_finite_under_zero_terminal_snr(prediction, last):
    weights = _weights(DiffusionConfig(prediction=prediction, min_snr_gamma=5.0, zero_terminal_snr=True))
    assert weights.isfinite().all()
    assert weights[-1] == last
    assert (weights[:-1] > 0).all()


def test_without_min_snr_every_weight_is_one():
    for zero_terminal in (False, True):
        assert (_weights(DiffusionConfig(zero_terminal_snr=zero_terminal)) == 1).all()
