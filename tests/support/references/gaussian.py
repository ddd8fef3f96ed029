"""The best possible denoiser of Gaussian data, an exact stand-in for a trained network."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.sections.objective import ObjectiveConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.diffusion.schedules import betas
from fastdiff.sampling.solvers import sample

CONFIG = DiTConfig(depth=1, hidden=16, heads=2, patch=2, size=4, channels=2, classes=3)
MEANS = torch.tensor([0.5, -0.25, 0.75, 0.0])  # by class; the last is the null class


class Gaussian:
    """The optimal denoiser of data ``N(MEANS[class], spread^2)``, in float64."""

    def __init__(self, objective: ObjectiveConfig, spread: float, config: DiTConfig = CONFIG) -> None:
        self.config, self.objective, self.spread = config, objective, spread
        self.calls: list[Tensor] = []
        self.times: list[float] = []
        if objective.process == "ddpm":
            self.alpha_bar = torch.cumprod(1 - betas(objective), 0)

    def __call__(self, noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        assert label.dtype == torch.int64
        assert time.dtype == (torch.int64 if self.objective.process == "ddpm" else torch.float32)
        self.calls.append(label)
        self.times.append(time[0].item())
        alpha, sigma, a, b = (value.view(-1, 1, 1, 1) for value in self.row(time))
        mean = MEANS.double()[label].view(-1, 1, 1, 1)
        # Without one in the other, so that each stays exact where there is almost none of it.
        distance = (noisy - alpha * mean) / (alpha**2 * self.spread**2 + sigma**2)
        return a * (mean + alpha * self.spread**2 * distance) + b * sigma * distance

    def row(self, time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(alpha, sigma, a, b), ``[B]`` each: input alpha * x0 + sigma * noise, target a * x0 + b * noise."""
        row = {"ddpm": self._ddpm, "flow": self._flow, "edm": self._edm}[self.objective.process](time)
        alpha, sigma, a, b = (torch.as_tensor(value, dtype=torch.float64).expand(len(time)) for value in row)
        return alpha, sigma, a, b

    def _ddpm(self, time: Tensor) -> tuple[Any, ...]:
        abar = self.alpha_bar[time]
        before = torch.where(time > 0, self.alpha_bar[time - 1], 1.0)
        alpha, sigma, beta = abar.sqrt(), (1 - abar).sqrt(), 1 - abar / before
        of_clean, of_noisy = before.sqrt() * beta / (1 - abar), (1 - beta).sqrt() * (1 - before) / (1 - abar)
        targets = {
            "x0": (1, 0),
            "epsilon": (0, 1),
            "v": (-sigma, alpha),
            "previous_x": (of_clean + of_noisy * alpha, of_noisy * sigma),
        }
        return alpha, sigma, *targets[self.objective.predicted]

    def _flow(self, time: Tensor) -> tuple[Any, ...]:
        if self.objective.convention == "sit":
            alpha, sigma, a, b = self._path(1 - time.double())
            return (alpha, sigma, -a, -b) if self.objective.predicted == "flow" else (alpha, sigma, a, b)
        if self.objective.convention == "repa":
            return self._path(time.double())
        return self._path(time.double() / 1000)

    def _path(self, t: Tensor) -> tuple[Any, ...]:
        if self.objective.path == "linear":
            alpha, sigma, slopes = 1 - t, t, (-1, 1)
        elif self.objective.path == "gvp":
            alpha, sigma = (math.pi / 2 * t).cos(), (math.pi / 2 * t).sin()
            slopes = -math.pi / 2 * sigma, math.pi / 2 * alpha
        else:
            # Song et al. 2021: the rate of noise grows from 0.1 to 20.
            alpha = torch.exp(-(0.1 * t + 19.9 * t**2 / 2) / 2)
            sigma = (1 - alpha**2).sqrt()
            rate = 0.1 + 19.9 * t
            slopes = -rate / 2 * alpha, rate / 2 * alpha**2 / sigma
        targets = {"flow": slopes, "x0": (1, 0), "epsilon": (0, 1), "score": (0, -1 / sigma)}
        return alpha, sigma, *targets[self.objective.predicted]

    def _edm(self, time: Tensor) -> tuple[Any, ...]:
        sigma, data = (4 * time.double()).exp(), self.objective.sigma_data
        total = sigma**2 + data**2
        skip, out = data**2 / total, sigma * data / total.sqrt()
        return total**-0.5, sigma * total**-0.5, (1 - skip) / out, -skip * sigma / out


def draw(model: Callable[..., Tensor], objective: ObjectiveConfig, labels: Tensor, **options: Any) -> Tensor:
    """``[N, 2, 4, 4]`` images of classes, one per label; the null class is the last."""
    shape, null = (CONFIG.channels, CONFIG.size, CONFIG.size), {"label": torch.tensor(CONFIG.classes)}
    return sample(model, objective, {"label": labels}, sampler_of(options), shape=shape, null=null, **options)


def sampler_of(options: dict[str, Any]) -> SamplerConfig:
    """The fields of a sampler, taken out of ``options``; 25 steps unless they say another number."""
    names = {field.name for field in fields(SamplerConfig)} & options.keys()
    return SamplerConfig(**{"steps": 25, **{name: options.pop(name) for name in names}})
