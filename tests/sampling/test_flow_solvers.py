"""Solvers of flow in its own time, against renderings in float64 written from the papers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig, EdmConfig, FlowConfig
from fastdiff.config.sections.sampler import OF_FLOW, SamplerConfig, SchedulerName
from fastdiff.errors import ConfigError
from fastdiff.sampling.solvers import _generator, sample
from tests.support.references.gaussian import MEANS, Gaussian, draw

LABELS = torch.tensor([0, 2, 1])
NULL, SHAPE = 3, (2, 3, 5)
DATA_TIME = FlowConfig(convention="sit")
NOISE_TIME = FlowConfig()


def network(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
    """Any smooth function of all of its inputs, another one for each channel."""
    strength = torch.tensor([0.4, 0.9]).view(1, 2, 1, 1).to(noisy) * (1 + label.view(-1, 1, 1, 1))
    return torch.sin(strength * noisy + time.view(-1, 1, 1, 1).to(noisy)) - 0.3 * noisy


def drawn(objective: FlowConfig, model: Any = network, **options: Any) -> Tensor:
    sampler = SamplerConfig(seed=4, **options)
    return sample(model, objective, {"label": LABELS}, sampler, shape=SHAPE, null={"label": torch.tensor(NULL)})


def noises(steps: int) -> list[Tensor]:
    """The initial noise, then that of each step: what each image's own generator gives."""
    generators = [_generator(4, number) for number in range(len(LABELS))]
    return [torch.stack([torch.randn(SHAPE, generator=g) for g in generators]).double() for _ in range(steps + 1)]


# ---- Euler of LightningDiT: data at t = 1, velocity from noise to data ------------------------------------


def lightning(points: int, shift: float, scale: float, start: float) -> Tensor:
    """linspace(0, 1, points), t' = s t / (1 + (s - 1) t); guidance of the first channel, from ``start`` on."""
    t = torch.linspace(0, 1, points, dtype=torch.float64)
    t = shift * t / (1 + (shift - 1) * t)
    (x,) = noises(0)
    for here, after in pairwise(t):
        velocity = network(x, here.expand(3), LABELS)
        if here >= start:
            free = network(x, here.expand(3), torch.full_like(LABELS, NULL))
            velocity[:, :1] = free[:, :1] + scale * (velocity[:, :1] - free[:, :1])
        x = x + (after - here) * velocity
    return x


def test_euler_is_that_of_lightningdit() -> None:
    options: dict[str, Any] = {"scheduler": "euler", "steps": 24, "shift": 1 / 0.3, "cfg": 3.0, "cfg_channels": 1}
    found = drawn(DATA_TIME, cfg_interval=(0.0, 0.9), **options)
    torch.testing.assert_close(found.double(), lightning(25, 0.3, 3.0, 0.1), rtol=0, atol=1e-5)
    assert (found - drawn(DATA_TIME, **options)).abs().max() > 0.01, "the interval has no part in it"


# ---- Heun of JiT and RiT: a last step of Euler -------------------------------------------------------------


def jit_heun(steps: int, shift: float, velocity: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Noise levels u' = s u / (1 + (s - 1) u), t = 1 - u'."""
    u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    t = 1 - shift * u / (1 + (shift - 1) * u)
    (x,) = noises(0)
    for number in range(steps):
        dt = t[number + 1] - t[number]
        here = velocity(x, t[number])
        ahead = x + dt * here
        if number < steps - 1:
            there = velocity(ahead, t[number + 1])
            ahead = x + dt * (here + there) / 2
        x = ahead
    return x


@pytest.mark.parametrize(("steps", "shift"), [(1, 1.0), (9, 1.0), (7, 24**0.5)])
def test_heun_ends_in_a_step_of_euler(steps: int, shift: float) -> None:
    calls = []

    def counted(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        calls.append(float(time[0]))
        return network(noisy, time, label)

    found = drawn(DATA_TIME, counted, scheduler="heun", steps=steps, shift=shift)
    expected = jit_heun(steps, shift, lambda x, t: network(x, t.expand(3), LABELS))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert len(calls) == 2 * steps - 1
    assert max(calls) < 1, "the network was asked about clean data"


@pytest.mark.parametrize(("steps", "shift", "floor"), [(50, 1.0, 0.05), (25, 24**0.5, 0.05), (4, 1.0, 0.4)])
def test_predicted_data_give_the_clamped_velocity(steps: int, shift: float, floor: float) -> None:
    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return (network(x, t.expand(3), LABELS) - x) / max(1 - float(t), floor)

    objective = FlowConfig(convention="sit", prediction="x0", velocity_floor=floor)
    found = drawn(objective, scheduler="heun", steps=steps, shift=shift)
    expected = jit_heun(steps, shift, velocity)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_the_last_step_of_jit_goes_40_percent_of_the_way() -> None:
    """From t = 0.98, by a velocity that is clamped at 1 - t = 0.05."""
    asked: list[Tensor] = []

    def observed(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        asked.append(noisy)
        return torch.full_like(noisy, 2.0)

    found = drawn(FlowConfig(convention="sit", prediction="x0"), observed, scheduler="heun", steps=50)
    torch.testing.assert_close(found, asked[-1] + 0.4 * (2.0 - asked[-1]), rtol=1e-5, atol=1e-5)


# ---- Euler-Maruyama of SiT, REPA and SR-DiT: noise at t = 1, velocity from data to noise -------------------


def repa_sde(steps: int, shift: float) -> Tensor:
    """linspace(1, 0.04, steps) and 0, shifted; diffusion 2 t, no noise in the last step."""
    t = torch.cat([torch.linspace(1, 0.04, steps, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    t = shift * t / (1 + (shift - 1) * t)
    x, *noise = noises(steps)
    for number in range(steps):
        here, dt = t[number], t[number + 1] - t[number]
        velocity = network(x, 1000 * here.expand(3), LABELS)
        score = -((1 - here) * velocity + x) / here  # of x = (1 - t) x0 + t e: the estimate of e over t, negative
        x = x + dt * (velocity - 0.5 * (2 * here) * score)
        if number < steps - 1:
            x = x + (2 * here).sqrt() * dt.abs().sqrt() * noise[number]
    return x


@pytest.mark.parametrize(("steps", "shift"), [(1, 1.0), (12, 1.0), (12, 2**0.5)])
def test_euler_maruyama_is_that_of_repa(steps: int, shift: float) -> None:
    found = drawn(NOISE_TIME, scheduler="euler-maruyama", steps=steps, shift=shift)
    torch.testing.assert_close(found.double(), repa_sde(steps, shift), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("path", ["linear", "gvp"])
def test_euler_maruyama_has_the_distribution_of_the_data(path: Any) -> None:
    objective, labels = FlowConfig(path=path), torch.ones(300, dtype=torch.int64)
    options: dict[str, Any] = {"scheduler": "euler-maruyama", "steps": 150, "batch": 300}
    images = draw(Gaussian(objective, 0.6), objective, labels, **options)
    assert float(images.mean()) == pytest.approx(float(MEANS[1]), abs=0.02)
    assert float(images.std()) == pytest.approx(0.6, rel=0.05)


# ---- every prediction and path; clamps; shifts -------------------------------------------------------------

EVERY = [FlowConfig(path=path, prediction=each) for path in ("linear", "gvp", "vp") for each in ("flow", "score")]


@pytest.mark.parametrize("objective", [*EVERY, FlowConfig(prediction="epsilon", convention="sit")], ids=str)
def test_the_probability_flow_is_followed(objective: FlowConfig) -> None:
    """It is linear for a Gaussian (Song et al. 2021): the distance from the mean in standard deviations stays."""
    by_exact_solver, by_heun = (
        draw(Gaussian(objective, 0.4), objective, LABELS, scheduler=scheduler, steps=200, seed=5)
        for scheduler in ("dpmsolver++", "heun")
    )
    torch.testing.assert_close(by_heun, by_exact_solver, rtol=0, atol=6e-3)


@pytest.mark.parametrize("scheduler", OF_FLOW)
def test_clamped_estimates_end_in_the_range_of_pixels(scheduler: SchedulerName) -> None:
    def bright(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        return (noisy - 3.0) / (time.view(-1, 1, 1, 1) / 1000)  # x0 is 3

    clamped, free = (drawn(NOISE_TIME, bright, scheduler=scheduler, steps=30, clip=clip) for clip in (True, False))
    # The last step of euler-maruyama leaves 0.04 of the estimate of the noise.
    tolerance = 0.2 if scheduler == "euler-maruyama" else 1e-4
    torch.testing.assert_close(clamped, torch.ones_like(clamped), rtol=0, atol=tolerance)
    torch.testing.assert_close(free, torch.full_like(free, 3.0), rtol=0, atol=tolerance)


@pytest.mark.parametrize("scheduler", ["ddim", "heun"])
def test_a_shift_by_the_latents_is_the_root_of_their_number_over_4096(scheduler: SchedulerName) -> None:
    by_size = drawn(DATA_TIME, scheduler=scheduler, steps=5, shift="latent")
    assert torch.equal(by_size, drawn(DATA_TIME, scheduler=scheduler, steps=5, shift=(2 * 3 * 5 / 4096) ** 0.5))


@pytest.mark.parametrize("scheduler", OF_FLOW)
def test_other_processes_and_respacing_are_refused(scheduler: SchedulerName) -> None:
    for objective in (DdpmConfig(), EdmConfig()):
        with pytest.raises(ConfigError, match=f"--scheduler {scheduler} integrates the velocity of flow.*dpmsolver"):
            draw(Gaussian(objective, 0.4), objective, LABELS, scheduler=scheduler)
    with pytest.raises(ConfigError, match=r"--respacing 250 .* use --steps"):
        drawn(DATA_TIME, scheduler=scheduler, respacing="250")
    with pytest.raises(ConfigError, match="0 sampling steps"):
        drawn(DATA_TIME, scheduler=scheduler, steps=0)


@pytest.mark.parametrize("scheduler", OF_FLOW)
def test_images_do_not_depend_on_the_split(scheduler: SchedulerName) -> None:
    options: dict[str, Any] = {"scheduler": scheduler, "steps": 6, "seed": 3}
    model: Callable[..., Tensor] = Gaussian(NOISE_TIME, 0.4)
    whole = draw(model, NOISE_TIME, LABELS, batch=3, **options)
    second = draw(model, NOISE_TIME, LABELS[1:], batch=1, first_index=1, **options)
    torch.testing.assert_close(second, whole[1:], rtol=1e-5, atol=1e-5)


# ---- guidance on an interval of levels ---------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["ddim", "ddpm", "euler"])
def test_guidance_only_within_the_interval_of_levels(scheduler: SchedulerName) -> None:
    sizes: dict[float, int] = {}

    def spy(noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        sizes[round(float(time[0]))] = len(noisy)
        return network(noisy, time / 1000, label)

    drawn(NOISE_TIME, spy, scheduler=scheduler, steps=10, cfg=2.0, cfg_interval=(0.2, 0.7))
    assert sizes == {time: 6 if 200 <= time <= 700 else 3 for time in range(100, 1001, 100)}


@pytest.mark.parametrize("interval", [(0.5, 0.5), (-0.1, 0.5), (0.2, 1.5), (float("nan"), 1.0)])
def test_an_interval_is_two_levels_that_ascend(interval: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match=r"--cfg-interval .* from 0 .data. to 1 .noise."):
        SamplerConfig(cfg_interval=interval)


@pytest.mark.parametrize("shift", [0.0, -1.0, float("inf"), float("nan"), "image"])
def test_a_shift_is_positive_or_by_the_latents(shift: Any) -> None:
    with pytest.raises(ConfigError, match=r"--shift .*: above 0, or latent"):
        SamplerConfig(shift=shift)
