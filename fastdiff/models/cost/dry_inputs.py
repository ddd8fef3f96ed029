"""Inputs of a network for a pass without data."""

from collections.abc import Collection

import torch
from torch import Tensor

from fastdiff.batch import DTYPES, Condition
from fastdiff.conditions import CONDITIONS, ConditionKind, Shape
from fastdiff.config.networks.registry import ModelConfig


def dry_inputs(model: ModelConfig, names: Collection[str], samples: int) -> tuple[Tensor, Condition]:
    """Return noisy latents ``[samples, C, H, W]`` and the known of the conditions ``names``: zeros, whole masks."""
    shapes = {**{name: () for name, kind in CONDITIONS.items() if not kind.shape}, **model.conditions}
    condition = {name: _blank(CONDITIONS[name], (samples, *shapes[name])) for name in names if name in shapes}
    if "position" in condition:
        condition["position"] = torch.arange(samples)
    return torch.zeros(samples, model.channels, model.size, model.size), condition


def _blank(kind: ConditionKind, shape: Shape) -> Tensor:
    return torch.full(shape, bool(kind.mask_of), dtype=DTYPES[kind.dtype])
