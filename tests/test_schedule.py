"""Schedules against diffusers, in closed form, and as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdiff.objective_config import DiffusionConfig
from fastdiff.errors import ConfigError
from fastdiff.schedule import Schedule, betas, zero_terminal_snr

NAMES = ("linear", "scaled_linear", "cosine")
EPS = 2.0**-24
"""Rounding error of fp32."""


def _diffusers(schedule, zero_terminal=False, **values):
    from diffusers import DDPMScheduler

    name = "squaredcos_cap_v2" if schedule == "cosine" else schedule
    ends = {"linear": (1e-4, 0.02), "scaled_linear": (0.00085, 0.012), "cosine": (1e-4, 0.02)}[schedule]
    values = {"beta_start": ends[0], "beta_end": ends[1], **values}
    return DDPMScheduler(beta_schedule=name, rescale_betas_zero_snr=zero_terminal, **values)


@pytest.mark.parametrize("schedule", NAMES)
def test_betas_are_those_of_diffusers(schedule):
    ours = betas(DiffusionConfig(schedule=schedule))
    assert ours.dtype == torch.float64
    theirs = _diffusers(schedule).betas.double()
    # theirs are fp32: a linspace (its ends, step and sum are rounded), then a square that doubles the error.
    torch.testing.assert_close(ours, theirs, rtol=8 * EPS, atol=0)


@pytest.mark.parametrize("timesteps", [50, 4000])
def test_linear_betas_scale_with_the_number_of_timesteps(timesteps):
    scale = 1000 / timesteps
    theirs = _diffusers("linear", num_train_timesteps=timesteps, beta_start=1e-4 * scale, beta_end=0.02 * scale)
    ours = betas(DiffusionConfig(timesteps=timesteps))
    torch.testing.assert_close(ours, theirs.betas.double(), rtol=8 * EPS, atol=0)


@pytest.mark.parametrize("schedule", NAMES)
def test_zero_terminal_snr_is_that_of_diffusers(schedule):
    config = DiffusionConfig(schedule=schedule, zero_terminal_snr=True)
    from diffusers.schedulers.scheduling_ddpm import rescale_zero_terminal_snr

    plain = betas(DiffusionConfig(schedule=schedule))
    torch.testing.assert_close(betas(config), rescale_zero_terminal_snr(plain), rtol=1e-9, atol=1e-13)
    # The scheduler itself multiplies 1000 fp32 factors, each rounded twice (1 - beta and the product).
    theirs = _diffusers(schedule, zero_terminal=True).alphas_cumprod.double().sqrt()
    ours = Schedule.build(config, "cpu", torch.float64).alpha
    # diffusers puts 2**-24 in place of the last 0.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2000 * EPS)
    assert betas(config)[-1] == 1
    assert ours[-1] == 0


def test_zero_terminal_snr_keeps_the_first_step():
    plain = betas(DiffusionConfig())
    torch.testing.assert_close(zero_terminal_snr(plain)[0], plain[0], rtol=1e-10, atol=0)


def test_cosine_betas_are_capped():
    table = betas(DiffusionConfig(schedule="cosine"))
    assert table.max() == 0.999


def test_too_few_linear_timesteps_are_refused():
    with pytest.raises(ConfigError, match=r"timesteps 20: the linear schedule needs more than 20"):
        DiffusionConfig(timesteps=20)


configs = st.builds(
    DiffusionConfig,
    schedule=st.sampled_from(NAMES),
    timesteps=st.integers(21, 2000),
    zero_terminal_snr=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(configs)
def test_alpha_and_sigma_are_a_rotation_and_snr_falls(config):
    exact = Schedule.build(config, "cpu", torch.float64)
    assert (exact.snr.diff() < 0).all()
    assert (exact.sigma > 0).all()
    torch.testing.assert_close(exact.alpha**2 + exact.sigma**2, torch.ones_like(exact.alpha), rtol=1e-14, atol=0)
    torch.testing.assert_close(exact.alpha**2 / exact.sigma**2, exact.snr, rtol=1e-13, atol=0)
    tables = Schedule.build(config, "cpu")
    for name in ("alpha", "sigma", "snr"):
        table = getattr(tables, name)
        assert table.dtype == torch.float32
        assert table.shape == (config.timesteps,)
        assert torch.equal(table, getattr(exact, name).float())
    # Each square carries twice the rounding of its root.
    total = tables.alpha.double() ** 2 + tables.sigma.double() ** 2
    assert (total - 1).abs().max() <= 2 * EPS * (1 + EPS)


@settings(deadline=None, max_examples=30)
@given(configs)
def test_the_product_of_the_betas_is_alpha_squared(config):
    abar = torch.cumprod(1 - betas(config), 0)
    alpha = Schedule.build(config, "cpu", torch.float64).alpha
    torch.testing.assert_close(alpha**2, abar, rtol=1e-11, atol=0)
