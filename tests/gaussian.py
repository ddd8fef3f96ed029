"""The best possible denoiser of Gaussian data, an exact stand-in for a trained network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastdiff.objective_config import DiffusionConfig
from fastdiff.model_config import DiTConfig
from fastdiff.sampling import sample
from fastdiff.schedule import betas

CONFIG = DiTConfig(depth=1, hidden=16, heads=2, patch=2, size=4, channels=2, classes=3)
MEANS = torch.tensor([0.5, -0.25, 0.75, 0.0])  # by class; the last is the null class


class Gaussian:
    """The optimal denoiser of data ``N(MEANS[class], spread^2)``, in float64."""

    def __init__(self, objective: DiffusionConfig, spread: float, config: DiTConfig = CONFIG) -> None:
        self.config, self.objective, self.spread = config, objective, spread
        self.alpha_bar = torch.cumprod(1 - betas(objective), 0)
        self.calls: list[Tensor] = []
        self.times: list[int] = []

    def __call__(self, noisy: Tensor, time: Tensor, /, label: Tensor) -> Tensor:
        assert time.dtype == label.dtype == torch.int64
        self.calls.append(label)
        self.times.append(int(time[0]))
        alpha_bar = self.alpha_bar[time].view(-1, 1, 1, 1)
        alpha, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
        mean = MEANS.double()[label].view(-1, 1, 1, 1)
        gain = alpha * self.spread**2 / (alpha_bar * self.spread**2 + sigma**2)
        x0 = mean + gain * (noisy - alpha * mean)
        # Without x0 in it, so that it stays exact where there is almost no noise.
        epsilon = sigma * (noisy - alpha * mean) / (alpha_bar * self.spread**2 + sigma**2)
        return {"x0": x0, "epsilon": epsilon, "v": alpha * epsilon - sigma * x0}[self.objective.prediction]


def draw(model: Callable[..., Tensor], objective: DiffusionConfig, labels: Tensor, **options: Any) -> Tensor:
    """``[N, 2, 4, 4]`` images of classes, one per label; the null class is the last."""
    shape, null = (CONFIG.channels, CONFIG.size, CONFIG.size), {"label": torch.tensor(CONFIG.classes)}
    return sample(model, objective, {"label": labels}, shape=shape, null=null, **options)
