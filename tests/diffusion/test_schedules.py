"""Schedules against float64 NumPy, against diffusers, in closed form, and as properties."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdiff.config.sections.objective import DdpmConfig, ObjectiveConfig
from fastdiff.diffusion.schedules import Schedule, alpha_bar_of, betas
from fastdiff.errors import ConfigError

OF_DIFFUSERS = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2"} | {
    name: name for name in ("sigmoid", "laplace")
}
NAMES = (*OF_DIFFUSERS, "quad", "const", "jsd", "warmup10", "warmup50")
EPS = 2.0**-24
"""Rounding error of fp32."""
Numbers = np.ndarray[Any, np.dtype[np.float64]]


def reference(schedule: str, timesteps: int) -> Numbers:
    """The betas, from the definitions."""
    start, end = 0.1 / timesteps, 20.0 / timesteps
    ramp = np.linspace(start, end, timesteps)
    step = np.arange(timesteps)

    def of_alpha_bar(function: Any) -> Numbers:
        values = [function(i / timesteps) for i in range(timesteps + 1)]
        return np.array([min(1 - after / before, 0.999) for before, after in pairwise(values)])

    def laplace(t: float) -> float:
        log_snr = -0.5 * math.copysign(1, 0.5 - t) * math.log(1 - 2 * abs(0.5 - t) + 1e-6)
        return math.sqrt(1 / (1 + math.exp(-log_snr)))

    def warmup(share: float) -> Numbers:
        rising = int(timesteps * share)
        return np.concatenate([np.linspace(start, end, rising), np.full(timesteps - rising, end)])

    match schedule:
        case "linear":
            return ramp
        case "scaled_linear":
            return (0.00085**0.5 + step / (timesteps - 1) * (0.012**0.5 - 0.00085**0.5)) ** 2
        case "cosine":
            return of_alpha_bar(lambda t: math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2)
        case "sigmoid":
            return 1e-4 + (0.02 - 1e-4) / (1 + np.exp(6 - 12 * step / (timesteps - 1)))
        case "laplace":
            return of_alpha_bar(laplace)
        case "quad":
            return np.linspace(start**0.5, end**0.5, timesteps) ** 2
        case "const":
            return np.full(timesteps, end)
        case "jsd":
            return np.array([1 / (timesteps - i) for i in step])
        case _:
            return warmup(0.1 if schedule == "warmup10" else 0.5)


def reference_zero_terminal_snr(table: Numbers) -> Numbers:
    """Lin et al. 2023, algorithm 1."""
    root = np.sqrt(np.cumprod(1 - table))
    first, last = root[0], root[-1]
    abar = ((root - last) * first / (first - last)) ** 2
    return 1 - abar / np.concatenate([[1.0], abar[:-1]])


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("timesteps", [100, 1000, 4000])
@pytest.mark.parametrize("schedule", NAMES)
def test_betas_are_those_of_the_definition(schedule: Any, timesteps: int, zero: bool) -> None:
    ours = betas(DdpmConfig(schedule=schedule, timesteps=timesteps, zero_terminal_snr=zero))
    theirs = reference(schedule, timesteps)
    expected = torch.from_numpy(reference_zero_terminal_snr(theirs) if zero else theirs)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-14)
    assert ours.min() > 0
    assert ours[:-1].max() < 1
    assert (ours[-1] == 1) == (zero or schedule == "jsd")


@pytest.mark.parametrize("timesteps", [21, 22, 23, 29, 30, 31, 99, 101, 110])
@pytest.mark.parametrize("schedule", ["warmup10", "warmup50"])
def test_warmup_rises_over_a_whole_number_of_steps(schedule: Any, timesteps: int) -> None:
    ours = betas(DdpmConfig(schedule=schedule, timesteps=timesteps))
    torch.testing.assert_close(ours, torch.from_numpy(reference(schedule, timesteps)), rtol=1e-12, atol=0)


def diffusers_scheduler(schedule: str, zero_terminal: bool = False, **values: Any) -> Any:
    from diffusers import DDPMScheduler

    ends = (0.00085, 0.012) if schedule == "scaled_linear" else (1e-4, 0.02)
    values = {"beta_start": ends[0], "beta_end": ends[1], **values}
    return DDPMScheduler(beta_schedule=OF_DIFFUSERS[schedule], rescale_betas_zero_snr=zero_terminal, **values)


@pytest.mark.parametrize("timesteps", [100, 1000, 4000])
@pytest.mark.parametrize("schedule", OF_DIFFUSERS)
def test_betas_are_those_of_diffusers(schedule: Any, timesteps: int) -> None:
    ours = betas(DdpmConfig(schedule=schedule, timesteps=timesteps))
    assert ours.dtype == torch.float64
    scale = 1000 / timesteps if schedule == "linear" else 1.0
    ends = {} if schedule == "scaled_linear" else {"beta_start": 1e-4 * scale, "beta_end": 0.02 * scale}
    scheduler = diffusers_scheduler(schedule, num_train_timesteps=timesteps, **ends)
    # theirs are fp32: a linspace (its ends, step and sum are rounded), then a square that doubles the error.
    torch.testing.assert_close(ours, scheduler.betas.double(), rtol=8 * EPS, atol=0)
    described = alpha_bar_of(scheduler.config)
    torch.testing.assert_close(described, torch.cumprod(1 - ours, 0), rtol=1e-10, atol=0)


@pytest.mark.parametrize("schedule", OF_DIFFUSERS)
def test_zero_terminal_snr_is_that_of_diffusers(schedule: Any) -> None:
    from diffusers.schedulers.scheduling_ddpm import rescale_zero_terminal_snr

    config = DdpmConfig(schedule=schedule, zero_terminal_snr=True)
    plain = betas(DdpmConfig(schedule=schedule))
    torch.testing.assert_close(betas(config), rescale_zero_terminal_snr(plain), rtol=1e-9, atol=1e-13)
    # The scheduler itself multiplies 1000 fp32 factors, each rounded twice (1 - beta and the product).
    theirs = diffusers_scheduler(schedule, zero_terminal=True).alphas_cumprod.double().sqrt()
    ours = Schedule.build(config, "cpu", torch.float64).alpha
    # diffusers puts 2**-24 in place of the last 0.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2000 * EPS)
    assert ours[-1] == 0


def test_other_schedules_of_diffusers_are_read() -> None:
    from diffusers import HeunDiscreteScheduler

    scheduler = HeunDiscreteScheduler(beta_schedule="exp")
    torch.testing.assert_close(
        alpha_bar_of(scheduler.config), scheduler.alphas_cumprod.double(), rtol=1e-3, atol=1000 * EPS
    )
    given = torch.rand(30, dtype=torch.float64) / 10
    assert torch.equal(alpha_bar_of({"trained_betas": given.tolist()}), torch.cumprod(1 - given, 0))
    assert len(alpha_bar_of({"beta_schedule": "of tomorrow"})) == 0


@pytest.mark.parametrize("schedule", ["linear", "quad", "const", "warmup10", "warmup50"])
def test_steps_of_more_than_all_noise_are_refused(schedule: Any) -> None:
    with pytest.raises(ConfigError, match=rf"timesteps 20: the {schedule} schedule needs more than 20"):
        DdpmConfig(schedule=schedule, timesteps=20)
    assert betas(DdpmConfig(schedule=schedule, timesteps=21)).max() < 1


# ---- what is derived from them -------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("timesteps", [100, 1000, 4000])
@pytest.mark.parametrize("schedule", NAMES)
def test_tables_follow_from_the_betas(schedule: Any, timesteps: int, zero: bool) -> None:
    """The posterior is that of two Gaussian observations of x_{t-1}: precisions add up (Ho et al. 2020, eq. 7)."""
    config = DdpmConfig(schedule=schedule, timesteps=timesteps, zero_terminal_snr=zero)
    found = Schedule.build(config, "cpu", torch.float64)
    beta = betas(config).numpy()
    abar = np.cumprod(1 - beta)
    before = np.concatenate([[1.0], abar[:-1]])
    # The variance after each step, without a difference of almost equal numbers.
    noise = np.zeros(timesteps + 1)
    for i, added in enumerate(beta):
        noise[i + 1] = (1 - added) * noise[i] + added
    # Precision of x_{t-1} from x0, and from x_t, which is sqrt(1 - beta) x_{t-1} and noise.
    variance = 1 / (1 / noise[1:-1] + (1 - beta[1:]) / beta[1:])
    expected = {
        "alpha": np.sqrt(abar),
        "sigma": np.sqrt(noise[1:]),
        "snr": abar / noise[1:],
        "beta": beta,
        "posterior_variance": np.concatenate([[0.0], variance]),
        "posterior_clean": np.concatenate([[1.0], variance * np.sqrt(before[1:]) / noise[1:-1]]),
        "posterior_noisy": np.concatenate([[0.0], variance * np.sqrt(1 - beta[1:]) / beta[1:]]),
    }
    for name, table in expected.items():
        column = getattr(found, name)
        assert column.isfinite().all(), name
        torch.testing.assert_close(column, torch.from_numpy(table), rtol=1e-10, atol=0, msg=name)
    assert (found.posterior_variance[0], found.snr[-1] == 0) == (0, zero or schedule == "jsd")


configs = st.builds(
    DdpmConfig,
    schedule=st.sampled_from(NAMES),
    timesteps=st.integers(21, 2000),
    zero_terminal_snr=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(configs)
def test_alpha_and_sigma_are_a_rotation_and_snr_falls(config: ObjectiveConfig) -> None:
    exact = Schedule.build(config, "cpu", torch.float64)
    assert (exact.snr.diff() < 0).all()
    assert (exact.sigma > 0).all()
    torch.testing.assert_close(exact.alpha**2 + exact.sigma**2, torch.ones_like(exact.alpha), rtol=1e-14, atol=0)
    torch.testing.assert_close(exact.alpha**2 / exact.sigma**2, exact.snr, rtol=1e-13, atol=0)
    tables = Schedule.build(config, "cpu")
    for name in Schedule.__dataclass_fields__:
        table = getattr(tables, name)
        assert table.dtype == torch.float32
        assert table.shape == (config.timesteps,)
        assert torch.equal(table, getattr(exact, name).float())
    # Each square carries twice the rounding of its root.
    total = tables.alpha.double() ** 2 + tables.sigma.double() ** 2
    assert (total - 1).abs().max() <= 2 * EPS * (1 + EPS)
