"""The drawn noise levels: shares, strata, densities and biases, as functions of the position alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from fastdiff.batch import Batch
from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.sections.timesteps import DENSITIES, TimestepConfig
from fastdiff.diffusion import densities
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.processes import build_process
from fastdiff.diffusion.timesteps import Tabulated, Timesteps, build_timesteps, golden_ranks
from fastdiff.parallel.world import World
from fastdiff.plugins.promises import HostSyncError, NoHostSync
from fastdiff.rng import Stream, uniform
from tests.support.references.timesteps import uniform_timesteps

SEED = 5
ALONE = World(rank=0, size=1, device=torch.device("cpu"))
DDPM, FLOW, EDM = DdpmConfig(), FlowConfig(), EdmConfig()
BATCHES = (1, 2, 3, 16, 60, 96, 256, 1000)


def sampler(objective: ObjectiveConfig = DDPM, batch_samples: int = 256, **config: object) -> Timesteps:
    values = TimestepConfig(**config)  # type: ignore[arg-type]
    values.check(objective)
    process = build_process(objective, "cpu", values)
    return build_timesteps(values, objective, process, seed=SEED, batch_samples=batch_samples, device="cpu")


def biases(density: str) -> dict[str, float]:
    """The options that biased densities require."""
    return {"bias_multiplier": 3.0} if density in ("earlier", "later", "range") else {}


def shares(position: torch.Tensor) -> torch.Tensor:
    return uniform(SEED, Stream.TIMESTEP, position, 1)[:, 0]


def objective(config: ObjectiveConfig = DDPM, batch_samples: int = 16, **timesteps: object) -> Objective:
    return Objective(
        config,
        seed=SEED,
        null={},
        device="cpu",
        timesteps=TimestepConfig(**timesteps),  # type: ignore[arg-type]
        batch_samples=batch_samples,
    )


def batch(position: torch.Tensor) -> Batch:
    latents = torch.randn(len(position), 2, 4, 4, generator=torch.Generator().manual_seed(int(position[0])))
    return Batch(latents, position, {})


def test_the_kernel_draws_what_the_sampler_draws() -> None:
    plain = objective()
    assert plain.timesteps.in_kernel
    position = torch.arange(40_000)
    native, weights = plain.timesteps.draw(position)
    assert weights is None
    assert torch.equal(native, uniform_timesteps(SEED, position, 1000))
    position = position[:64]
    inside, outside = plain.add_noise(batch(position)), plain.add_noise(batch(position), native=native[:64])
    assert torch.equal(inside.time, native[:64])
    assert torch.equal(inside.noisy, outside.noisy)


def test_only_plain_ddpm_is_left_to_the_kernel() -> None:
    for config in (DDPM, FLOW, EDM):
        for density in DENSITIES[config.process]:
            for stratified in (False, True):
                expected = config is DDPM and density == "uniform" and not stratified
                assert sampler(config, density=density, stratified=stratified, **biases(density)).in_kernel is expected


@pytest.mark.parametrize("samples", BATCHES)
def test_every_step_meets_every_stratum_once(samples: int) -> None:
    """As many timesteps as samples: every step is a permutation of them."""
    config = DdpmConfig(schedule="cosine", timesteps=max(2, samples))
    position = torch.arange(7 * samples, 60 * samples)
    native, weights = sampler(config, samples, stratified=True).draw(position)
    assert weights is None
    if samples > 1:
        assert torch.equal(native.view(-1, samples).sort(dim=1).values, torch.arange(samples).expand(53, -1))
    else:
        assert torch.equal(native, uniform_timesteps(SEED, position, 2)), "one stratum is plain"
    # In fp32 some of these many shares would be rounded up into the next stratum.
    t, _ = sampler(replace(FLOW), samples, stratified=True).draw(position)
    assert t.dtype == torch.float32
    assert 0 <= t.min() <= t.max() <= 1


@pytest.mark.parametrize("samples", [*BATCHES, 12, 56, 288, 364, 512])
def test_every_part_of_a_step_is_spread(samples: int) -> None:
    """Each micro-batch, whatever its size: its largest gap is below twice the mean gap."""
    ranks = golden_ranks(samples)
    assert torch.equal(ranks.sort().values, torch.arange(samples))
    for micro in (m for m in range(1, samples + 1) if samples % m == 0):
        parts = ranks.view(-1, micro).sort(dim=1).values
        gaps = torch.diff(torch.cat([parts, parts[:, :1] + samples], dim=1), dim=1)
        assert gaps.max() * micro <= 2 * samples


@pytest.mark.parametrize("density", ["uniform", "logit_normal", "later", "importance"])
@pytest.mark.parametrize("stratified", [False, True])
def test_levels_do_not_depend_on_ranks_and_micro_batches(density: str, stratified: bool) -> None:
    drawn = sampler(density=density, stratified=stratified, batch_samples=48, **biases(density))
    position = torch.arange(480, 528)
    whole, _ = drawn.draw(position)
    for parts in (2, 4, 12, 48):
        assert torch.equal(torch.cat([drawn.draw(part)[0] for part in position.chunk(parts)]), whole)
    assert torch.equal(drawn.draw(position.flip(0))[0], whole.flip(0))


@pytest.mark.parametrize("stratified", [False, True])
def test_the_marginal_is_even(stratified: bool) -> None:
    native, _ = sampler(stratified=stratified, batch_samples=500).draw(torch.arange(500 * 192))
    counts = torch.bincount(native, minlength=1000).double()
    chi_square = ((counts - 96) ** 2 / 96).sum().item()
    # 999 degrees of freedom; a stratum has two timesteps, of which chance takes one.
    expected = 500 if stratified else 999
    assert abs(chi_square - expected) < 4 * math.sqrt(2 * expected)


def test_strata_lower_the_standard_error_of_the_loss() -> None:
    """Of a loss that falls with t as that of noise does, times the chance of the samples: chi-square of 64 pixels."""
    steps, samples = 200, 256
    position = torch.arange(steps * samples)
    chance = torch.randn(len(position), 64, generator=torch.Generator().manual_seed(0)).square().mean(dim=1).double()

    def errors(stratified: bool, chance: torch.Tensor) -> tuple[float, float]:
        native, _ = sampler(stratified=stratified, batch_samples=samples).draw(position)
        logged = (chance / (0.02 + 10 * (native / 1000) ** 2)).view(steps, samples).mean(dim=1)
        return logged.std().item(), logged.mean().item()

    (plain, mean), (strata, same_mean) = errors(False, chance), errors(True, chance)
    assert plain > 3.5 * strata
    assert abs(mean - same_mean) < 3 * plain / math.sqrt(steps)
    without_chance = torch.ones_like(chance)
    assert errors(False, without_chance)[0] > 50 * errors(True, without_chance)[0], "falls faster than 1 / samples"


def reference(density: str, u: np.ndarray, config: TimestepConfig) -> np.ndarray:
    """t of each uniform number, in float64 from Esser et al. 2024, section 3.1; ascending."""
    if density == "uniform":
        t = u
    elif density == "logit_normal":
        mean, std = config.mean or 0.0, config.std or 1.0
        ends = (scipy.special.logit([config.truncation, 1 - config.truncation]) - mean) / std
        t = scipy.special.expit(mean + std * scipy.stats.truncnorm.ppf(u, *ends))
    elif density == "mode":
        v = 1 - u
        t = 1 - v - config.mode_scale * (np.cos(np.pi / 2 * v) ** 2 - 1 + v)
    else:
        t = 1 - 1 / (np.tan(np.pi / 2 * u) + 1)
    return config.shift * t / (1 + (config.shift - 1) * t)


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        TimestepConfig(density="uniform"),
        TimestepConfig(density="uniform", shift=3.0),
        TimestepConfig(density="logit_normal"),
        TimestepConfig(density="logit_normal", mean=-0.5, std=0.7, shift=0.5),
        TimestepConfig(density="logit_normal", truncation=0.001, shift=math.sqrt(24)),
        TimestepConfig(density="logit_normal", mean=-1.5, std=2.0, truncation=0.1),
        TimestepConfig(density="mode", mode_scale=0.81),
        TimestepConfig(density="cosmap", shift=3.0),
    ],
)
def test_densities_are_quantiles_of_the_share(config: TimestepConfig, stratified: bool) -> None:
    position = torch.arange(512)
    u = shares(position).double().numpy()
    if stratified:
        u = (np.tile(golden_ranks(128).numpy(), 4) + u) / 128
    config = replace(config, stratified=stratified)
    options = {"seed": SEED, "batch_samples": 128, "device": "cpu"}
    t = build_timesteps(config, FLOW, build_process(FLOW, "cpu"), **options).draw(position)[0]
    expected = reference(config.density, u, config)
    np.testing.assert_allclose(t.double().numpy(), expected, rtol=1e-5, atol=1e-7)
    if config.shift == 1:  # ddpm has no shift
        t = build_timesteps(config, DDPM, build_process(DDPM, "cpu"), **options).draw(position)[0]
        timestep = np.floor(1000 * expected)
        off = t.numpy() != timestep
        assert off.mean() < 0.01, "only where fp32 rounds over a border"
        np.testing.assert_allclose(1000 * expected[off], t.numpy()[off], atol=1e-3)


def test_no_share_leaves_a_truncation() -> None:
    for mean, std, edge in ((0.0, 1.0, 0.001), (-0.8, 0.8, 0.3), (3.0, 5.0, 0.25)):
        config = TimestepConfig(density="logit_normal", mean=mean, std=std, truncation=edge)
        ends = torch.tensor([0.0, 2.0**-32, 1 - 2.0**-24])
        t = densities.truncated_logit_normal(ends, mean, std, edge, config.kept())
        assert np.float32(edge) <= t.min() <= t.max() <= np.float32(1 - edge)


@pytest.mark.parametrize(("mean", "std"), [(None, None), (-0.4, 1.0)])
def test_sigma_of_edm_is_log_normal(mean: float | None, std: float | None) -> None:
    position = torch.arange(512)
    sigma, _ = sampler(EDM, mean=mean, std=std).draw(position)
    quantile = scipy.special.ndtri(shares(position).double().numpy())
    expected = np.exp((-1.2 if mean is None else mean) + (1.2 if std is None else std) * quantile)
    np.testing.assert_allclose(sigma.double().numpy(), expected, rtol=2e-5)


def diffusers_frequencies(config: TimestepConfig, timesteps: int) -> np.ndarray:
    """Probability of each timestep, as the options of diffusers' SDXL script (``--timestep_bias_*``) are meant."""
    weights = np.ones(timesteps)
    biased = int(config.bias_portion * timesteps)
    chosen = {
        "earlier": slice(0, biased),
        "later": slice(timesteps - biased, timesteps),
        "range": slice(config.bias_begin, config.bias_end),
    }[config.density]
    weights[chosen] *= config.bias_multiplier
    return weights / weights.sum()


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        TimestepConfig(density="earlier", bias_multiplier=3.0),
        TimestepConfig(density="later", bias_multiplier=0.25, bias_portion=0.333),
        TimestepConfig(density="range", bias_multiplier=10.0, bias_begin=20, bias_end=50),
        TimestepConfig(density="range", bias_multiplier=10.0, bias_begin=70),
    ],
)
def test_biased_steps_are_drawn_as_often_as_diffusers_does(config: TimestepConfig, stratified: bool) -> None:
    objective = DdpmConfig(timesteps=100)
    drawn = sampler_of(replace(config, stratified=stratified), objective)
    native, weights = drawn.draw(torch.arange(100_000))
    assert weights is None, "the loss is not corrected, as there"
    expected = diffusers_frequencies(config, 100) * 100_000
    counts = torch.bincount(native, minlength=100).numpy()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 99 + 4 * math.sqrt(2 * 99)
    if stratified:
        assert abs(counts - expected).max() < 4 * math.sqrt(100_000 / 256), "at most the two ends of each step's strata"


def sampler_of(config: TimestepConfig, objective: ObjectiveConfig) -> Timesteps:
    process = build_process(objective, "cpu")
    return build_timesteps(config, objective, process, seed=SEED, batch_samples=256, device="cpu")


def test_a_table_meets_its_ends() -> None:
    """Rows without weight never, and the largest share the last row with one; neighbours of every border are told."""
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0], dtype=torch.float64)
    table = Tabulated(weights)
    ends = [0.0, 3 / 8 - 1e-12, 3 / 8 + 1e-12, 0.5 - 1e-12, 0.5 + 1e-12, math.nextafter(1.0, 0.0)]
    assert table(torch.tensor(ends, dtype=torch.float64)).tolist() == [1, 1, 3, 3, 4, 4]
    assert table(torch.tensor([1 - 2.0**-24])).tolist() == [4], "the largest fp32 share"
    torch.testing.assert_close(table.correction(torch.tensor([1, 3, 4])), torch.tensor([8 / 18, 8 / 6, 8 / 24]))


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize(("config", "density"), [(c, d) for c in (DDPM, FLOW, EDM) for d in DENSITIES[c.process]])
def test_no_density_waits_for_the_device(config: ObjectiveConfig, density: str, stratified: bool) -> None:
    drawn = sampler(config, 32, density=density, stratified=stratified, **biases(density))
    losses = torch.linspace(0, 1, 16)
    losses[3] = math.nan
    with NoHostSync():
        for step in range(2):
            for micro in range(2):
                position = torch.arange(16) + 32 * step + 16 * micro
                native, _ = drawn.draw(position)
                drawn.observe(native, losses, position)
            drawn.end_step(ALONE)
    with pytest.raises(HostSyncError, match="reads a number from the device"), NoHostSync():
        losses[0].item()


@pytest.mark.parametrize("density", ["uniform", "importance"])
def test_dream_keeps_the_levels_that_were_drawn(density: str) -> None:
    dreaming = objective(DdpmConfig(dream=True), density=density, stratified=True)
    position = torch.arange(16)
    native, _ = dreaming.timesteps.draw(position)
    data = batch(position)
    corruption = dreaming.add_noise(data, lambda noisy, time: torch.zeros_like(noisy))
    assert torch.equal(corruption.time, native)
    assert corruption.correction is not None
