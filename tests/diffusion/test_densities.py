"""Quantile functions of the noise levels: against SciPy, the published densities and diffusers' draws."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from fastdiff.diffusion import densities
from fastdiff_kernels.noising import uniform_time

DENSITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "logit_normal": lambda u: densities.logit_normal(u, 0.0, 1.0),
    "logit_normal-narrow": lambda u: densities.logit_normal(u, 0.5, 0.3),
    "logit_normal-wide": lambda u: densities.logit_normal(u, -1.0, 8.0),
    "mode": lambda u: densities.mode(u, 1.29),
    "mode-most": lambda u: densities.mode(u, 1.75),
    "mode-least": lambda u: densities.mode(u, -1.0),
    "cosmap": densities.cosmap,
}
EXTREMES = torch.tensor([0.0, 2.0**-32, 2.0**-24, 0.5, 1 - 2.0**-24])


def uniforms(count: int = 4000) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(0))


def grid(count: int = 20_000, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.arange(count, dtype=torch.float64) + 0.5) / count).to(dtype)


def as_published(name: str, u: np.ndarray) -> Any:
    """In float64, as the papers write it."""
    kind, _, which = name.partition("-")
    if kind == "logit_normal":
        mean, std = {"": (0.0, 1.0), "narrow": (0.5, 0.3), "wide": (-1.0, 8.0)}[which]
        return 1 / (1 + np.exp(-(mean + std * stats.norm.ppf(u))))
    if kind == "mode":
        scale = {"": 1.29, "most": 1.75, "least": -1.0}[which]
        # Ours is its mirror image: that of 1 - u.
        return 1 - (1 - u) - scale * (np.cos(np.pi / 2 * (1 - u)) ** 2 - 1 + (1 - u))
    return 1 - 1 / (np.tan(np.pi / 2 * u) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DENSITIES)
def test_the_quantiles_are_those_of_the_papers(name: str, dtype: torch.dtype) -> None:
    u = grid(dtype=dtype)
    found = DENSITIES[name](u)
    assert found.dtype == dtype
    # Where the slope is about 0, in the middle of mode-most, fp32 rounds up and down.
    assert (found.diff() >= -2 * torch.finfo(dtype).eps).all()
    expected = as_published(name, u.double().numpy())
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 if dtype == torch.float32 else 1e-7)
    whole = densities.log_normal(u, -1.2, 1.2)
    np.testing.assert_allclose(whole, np.exp(-1.2 + 1.2 * stats.norm.ppf(u.double().numpy())), rtol=1e-5)


@pytest.mark.parametrize("name", DENSITIES)
def test_the_ends_stay_inside(name: str) -> None:
    """The uniform numbers of a run may be exactly 0; ddpm needs a timestep below T."""
    t = DENSITIES[name](EXTREMES)
    assert t.isfinite().all()
    assert (t >= 0).all()
    assert (t < 1).all()
    for timesteps in (2, 1000, 2**24):
        assert 0 <= uniform_time(t, timesteps).min() <= uniform_time(t, timesteps).max() < timesteps
    sigma = densities.log_normal(EXTREMES, -1.2, 1.2)
    assert sigma.isfinite().all()
    assert (sigma > 0).all()
    for value in (t, sigma):
        assert (value.diff() >= 0).all()
        assert value[0] < value[3] < value[4]


def test_draws_have_the_published_densities() -> None:
    u = uniforms()
    logits = torch.logit(densities.logit_normal(u, 0.3, 0.8).double()).numpy()
    assert stats.kstest(logits, stats.norm(0.3, 0.8).cdf).pvalue > 0.01
    assert stats.kstest(densities.log_normal(u, -0.6, 1.2).double().log(), stats.norm(-0.6, 1.2).cdf).pvalue > 0.01

    def cumulative(t: float) -> float:
        value: float = integrate.quad(lambda s: 2 / (math.pi * (1 - 2 * s + 2 * s**2)), 0, t)[0]
        return value

    assert cumulative(1.0) == pytest.approx(1)
    assert stats.kstest(densities.cosmap(u[:500]).double().numpy(), np.vectorize(cumulative)).pvalue > 0.01
    other = np.random.default_rng(1).random(4000)
    published = 1 - other - 1.29 * (np.cos(np.pi / 2 * other) ** 2 - 1 + other)
    assert stats.ks_2samp(densities.mode(u, 1.29).numpy(), published).pvalue > 0.01
    assert stats.ks_2samp(densities.mode(u, 0.5).numpy(), published).pvalue < 1e-6, "the test can tell"


@pytest.mark.parametrize(
    ("scheme", "options", "ours"),
    [
        ("logit_normal", {"logit_mean": 0.2, "logit_std": 0.7}, lambda u: densities.logit_normal(u, -0.2, 0.7)),
        ("mode", {"mode_scale": 1.29}, lambda u: densities.mode(u, 1.29)),
        ("none", {}, lambda u: u),
    ],
)
def test_draws_are_distributed_as_those_of_diffusers(
    scheme: str, options: dict[str, float], ours: Callable[[Tensor], Tensor]
) -> None:
    """Its numbers are places in a list of timesteps that descends, so that the mean of its logits is minus ours."""
    theirs = diffusers_draws(scheme, options, shift=1.0)
    assert stats.ks_2samp(ours(uniforms()).numpy(), theirs).pvalue > 0.01
    moved = diffusers_draws(scheme, options, shift=3.0)
    assert stats.ks_2samp(densities.shift(ours(uniforms()), 3.0).numpy(), moved).pvalue > 0.01
    if scheme == "logit_normal":
        assert stats.ks_2samp(1 - ours(uniforms()).numpy(), theirs).pvalue < 1e-6, "the test can tell the sign"


def diffusers_draws(scheme: str, options: dict[str, float], shift: float) -> np.ndarray:
    """4000 levels t, drawn as its script for Stable Diffusion 3 does."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.training_utils import compute_density_for_timestep_sampling

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    share = compute_density_for_timestep_sampling(scheme, 4000, **options, generator=torch.Generator().manual_seed(8))
    places = (share * scheduler.config.num_train_timesteps).long()
    levels: np.ndarray = scheduler.timesteps[places].numpy() / 1000
    return levels


def test_the_shift_is_that_of_sd3() -> None:
    t = torch.linspace(0, 1, 1001)
    for k in (0.2, 1.0, 3.0, 6.3):
        moved = densities.shift(t, k)
        exact = t.double()
        torch.testing.assert_close(moved.double(), k * exact / (1 + (k - 1) * exact), rtol=1e-6, atol=1e-7)
        assert (moved.diff() > 0).all()
        assert 0 == moved[0] < moved[-1] <= 1
    assert torch.equal(densities.shift(t, 1.0), t)
    # Two images, the second of k^2 times the pixels, at times of the same uncertainty of their mean.
    torch.testing.assert_close(densities.shift(densities.shift(t, 3.0), 1 / 3.0), t, rtol=0, atol=1e-6)
