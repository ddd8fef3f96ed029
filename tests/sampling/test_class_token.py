"""The class token of a teacher in sampling: Heun of RiT in float64, and the SDE of SR-DiT."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.config.sections.sampler import SamplerConfig, SamplingConfig
from fastdiff.errors import ConfigError
from fastdiff.sampling.solvers import _generator, sample

LABELS, NULL, SHAPE = torch.tensor([0, 2, 1]), 3, (2, 3, 5)
RIT = FlowConfig(convention="sit", prediction="x0", teacher_weight=0.2)
SR_DIT = FlowConfig(convention="repa", teacher_weight=0.03)


def network(noisy: Tensor, time: Tensor, /, teacher_token: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Any smooth functions in which the two act on each other."""
    strength = torch.tensor([0.4, 0.9]).view(1, 2, 1, 1).to(noisy) * (1 + label.view(-1, 1, 1, 1))
    both = teacher_token[:, :2, None, None] + time.view(-1, 1, 1, 1).to(noisy)
    token = torch.cos(teacher_token * (1 + label[:, None])) + noisy.mean(dim=(1, 2, 3))[:, None]
    return torch.sin(strength * noisy + both) - 0.3 * noisy, 0.5 * token


def drawn(objective: FlowConfig, width: int = 2, model: Any = network, **options: Any) -> Tensor:
    sampler, null = SamplerConfig(seed=4, **options), {"label": torch.tensor(NULL)}
    return sample(model, objective, {"label": LABELS}, sampler, shape=SHAPE, teacher_width=width, null=null)


def begin(width: int = 2) -> tuple[list[torch.Generator], Tensor, Tensor]:
    generators = [_generator(4, number) for number in range(len(LABELS))]
    numbers = normal(generators, width)
    return generators, numbers[0], numbers[1]


def normal(generators: list[torch.Generator], width: int) -> tuple[Tensor, Tensor]:
    flat = torch.stack([torch.randn(math.prod(SHAPE) + width, generator=g) for g in generators]).double()
    return flat[:, : math.prod(SHAPE)].view(-1, *SHAPE), flat[:, math.prod(SHAPE) :]


def rit(steps: int, shift: float, scale: float, *, coupled: bool) -> Tensor:
    """Data at t = 1; both velocities are (x0 - z) / max(1 - t, 0.05) and guided alike for 0.1 < t < 0.98."""
    _, z, token = begin()
    if coupled:
        token = z.mean(dim=(2, 3))
    u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    t = 1 - shift * u / (1 + (shift - 1) * u)

    def velocities(z: Tensor, token: Tensor, t: Tensor, label: Tensor) -> list[Tensor]:
        x = network(z, t.expand(3), token, label)
        return [(out - now) / (1 - t).clamp(min=0.05) for out, now in zip(x, (z, token), strict=True)]

    def guided(z: Tensor, token: Tensor, t: Tensor) -> list[Tensor]:
        found = velocities(z, token, t, LABELS)
        if not 0.1 < t < 0.98:
            return found
        free = velocities(z, token, t, torch.full_like(LABELS, NULL))
        return [without + scale * (given - without) for given, without in zip(found, free, strict=True)]

    for number in range(steps):
        dt = t[number + 1] - t[number]
        here = guided(z, token, t[number])
        ahead = z + dt * here[0], token + dt * here[1]
        if number < steps - 1:
            there = guided(*ahead, t[number + 1])
            ahead = z + dt * (here[0] + there[0]) / 2, token + dt * (here[1] + there[1]) / 2
        z, token = ahead
    return z


@pytest.mark.parametrize("coupled", [False, True])
def test_heun_is_that_of_rit(coupled: bool) -> None:
    options: dict[str, Any] = {"scheduler": "heun", "steps": 12, "shift": 2.5, "cfg": 1.5, "cfg_interval": (0.02, 0.9)}
    found = drawn(RIT, coupled_noise=coupled, **options)
    torch.testing.assert_close(found.double(), rit(12, 2.5, 1.5, coupled=coupled), rtol=0, atol=1e-5)
    assert (found - drawn(RIT, coupled_noise=not coupled, **options)).abs().max() > 0.01


def test_euler_maruyama_gives_the_token_noise_of_its_own() -> None:
    """t from 1 (noise) to 0.04, then the mean: dx = (v + noise) dt + sqrt(2 t) dw with v = noise - data."""
    generators, z, token = begin()
    t = torch.cat([torch.linspace(1, 0.04, 10, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    for number in range(10):
        here, dt = t[number], t[number] - t[number + 1]
        v = network(z, here.expand(3), token, LABELS)
        noise = [now + (1 - here) * velocity for now, velocity in zip((z, token), v, strict=True)]
        z, token = (now - dt * (a + b) for now, a, b in zip((z, token), v, noise, strict=True))
        if number < 9:
            fresh = normal(generators, 2)
            z, token = (now + (2 * here * dt).sqrt() * w for now, w in zip((z, token), fresh, strict=True))
    found = drawn(SR_DIT, scheduler="euler-maruyama", steps=10)
    torch.testing.assert_close(found.double(), z, rtol=0, atol=1e-5)


def test_guidance_of_some_channels_leaves_the_token_alone() -> None:
    seen: list[Tensor] = []

    def noting(noisy: Tensor, time: Tensor, /, teacher_token: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(teacher_token[:3])
        return noisy * 0, label[:, None] * torch.ones_like(teacher_token)

    for channels in (1, None):
        drawn(SR_DIT, model=noting, scheduler="euler", steps=2, cfg=2.0, cfg_channels=channels)
    steps = [second - first for first, second in (seen[:2], seen[2:])]
    free = torch.full_like(LABELS, NULL)
    for step, velocity in zip(steps, (LABELS, free + 2 * (LABELS - free)), strict=True):
        torch.testing.assert_close(step, -0.5 * velocity[:, None].expand(-1, 2))


def test_every_solver_takes_the_token_along() -> None:
    for scheduler in ("ddim", "dpmsolver++", "ddpm", "euler", "heun", "euler-maruyama"):
        found = drawn(SR_DIT, width=7, scheduler=scheduler, steps=4, cfg=1.5, model=wide)
        assert found.shape == (3, *SHAPE)
        assert found.isfinite().all()


def wide(noisy: Tensor, time: Tensor, /, teacher_token: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    latents, token = network(noisy, time, teacher_token[:, :2], label)
    return latents, torch.cat([token, teacher_token[:, 2:]], dim=1)


def test_what_the_token_excludes_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--coupled-noise: the class token of a teacher has the width 7, expected .* 2"
    ):
        drawn(SR_DIT, width=7, model=wide, coupled_noise=True)
    with pytest.raises(ConfigError, match=r"--coupled-noise: .* has the width 0"):
        drawn(FlowConfig(), width=0, coupled_noise=True)
    with pytest.raises(ConfigError, match="--clip-denoised clamps pixels, and would clamp the class token"):
        drawn(SR_DIT, clip=True)
    model = DiTConfig(depth=1, hidden=16, heads=2, patch=1, size=3, channels=4, classes=2, teacher_width=5)
    with pytest.raises(ConfigError, match=r"--sampling.coupled_noise needs --model.teacher_width 4, .*; given 5"):
        RunConfig(model=model, objective=RIT, sampling=SamplingConfig(coupled_noise=True))
