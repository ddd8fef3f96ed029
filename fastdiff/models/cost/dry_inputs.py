"""Inputs of a network for a pass without data."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from fastdiff.batch import DTYPES, Condition
from fastdiff.conditions import CONDITIONS
from fastdiff.config.networks.registry import ModelConfig


def dry_inputs(model: ModelConfig, names: Collection[str], samples: int) -> tuple[Tensor, Condition]:
    """Return noisy latents ``[samples, C, H, W]`` and the conditions of a network: zeros, and masks of whole captions.

    Args:
        model: shape of the network.
        names: names of its conditions (``BlockwiseModel.inputs``); unknown ones are left out.
        samples: rows of each input.
    """
    condition: Condition = {"position": torch.arange(samples)} if "position" in names else {}
    for name in names:
        kind = CONDITIONS.get(name)
        shape = model.conditions.get(name, () if kind and not kind.shape else None)
        if kind and shape is not None and name not in condition:
            condition[name] = torch.full((samples, *shape), bool(kind.mask_of), dtype=DTYPES[kind.dtype])
    return torch.zeros(samples, model.channels, model.size, model.size), condition
