"""Classifier-free guidance of a network (Ho & Salimans 2022, arXiv:2207.12598), on some channels and noise levels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.routing import PATH

Denoiser = Callable[..., Tensor]
"""Model, called with noisy latents ``[B, C, H, W]`` fp32, times ``[B]`` (int64 timesteps or fp32 times) and the
condition's tensors by name; returns ``[B, C or 2C, H, W]``: C channels of prediction, then C of a learned variance."""
Predict = Callable[[Tensor, Tensor, float], Tensor]
"""Guided model, called with noisy latents and times, and with the noise level as a share of the way from data (0) to
noise (1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guidance:
    """How much a prediction is guided, and where."""

    scale: float
    """``uncond + scale * (cond - uncond)``; 1: no guidance."""
    channels: int
    """Number of leading channels that are guided; the others are the conditional prediction."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest noise level with guidance, both included (Kynkäänniemi et al. 2024, arXiv:2404.07724)."""
    norm: int | None = None
    """Side of a square of latents whose guided prediction gets the norm of the conditional one, over all channels
    (Qwen-Image's pipeline); None: the norm is not changed."""

    def applies(self, depth: float) -> bool:
        """Whether a noise level has guidance."""
        return self.scale != 1.0 and self.interval[0] <= depth <= self.interval[1]


def guided(model: Denoiser, condition: Condition, null: Condition, guidance: Guidance) -> Predict:
    """Return ``model`` under guidance; a learned variance stays that of the conditional prediction.

    DiT does the same (Peebles & Xie 2023, ``forward_with_cfg``): an extrapolated variance could leave its range.
    Levels without guidance take one pass of ``[B, ...]`` instead of ``[2B, ...]``.
    """
    if guidance.scale == 1.0:
        return lambda noisy, time, depth: model(noisy, time, **condition)
    without = {
        name: null[name].to(value).expand_as(value) if name in null else value for name, value in condition.items()
    }
    both = {name: torch.cat([value, without[name]]) for name, value in condition.items()}
    count = guidance.channels

    def predict(noisy: Tensor, time: Tensor, depth: float) -> Tensor:
        if not guidance.applies(depth):
            return model(noisy, time, **condition)
        joined = model(torch.cat([noisy, noisy]), torch.cat([time, time]), **both)
        conditional, unconditional = joined.float().chunk(2)  # [2B, C or 2C, H, W] -> 2 x [B, C or 2C, H, W]
        others, unconditional = conditional[:, count:], unconditional[:, :count]
        found = unconditional + guidance.scale * (conditional[:, :count] - unconditional)
        if guidance.norm is not None:
            found = found * _norm_ratio(conditional[:, :count], found, guidance.norm)
        return torch.cat([found, others], dim=1)

    return predict


def with_path_drop(model: ModelConfig, condition: Condition, null: Condition) -> tuple[Condition, Condition]:
    """Return both such that the unconditional prediction does without the sparse path of a network that has learned to.

    Path-drop guidance (Park et al. 2025, arXiv:2510.21986); SR-DiT samples so, too.
    """
    if not model.guided_without_path:
        return condition, null
    count, device = next((len(value), value.device) for value in condition.values())
    has_path = torch.ones(count, dtype=torch.bool, device=device)
    return {**condition, PATH: has_path}, {**null, PATH: torch.tensor(False)}


def _norm_ratio(of: Tensor, to: Tensor, side: int) -> Tensor:
    """Return the norm of ``of [B, C, H, W]`` over that of ``to`` in squares of latents, ``[B, 1, H, W]``."""
    energy = [F.avg_pool2d(each.square().sum(1, keepdim=True), side) for each in (of, to)]
    return (energy[0] / energy[1]).sqrt().repeat_interleave(side, 2).repeat_interleave(side, 3)
