"""Inputs of a network for a pass without data."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.networks.pretrained import CAPTION_TOKENS
from fastdiff.config.networks.registry import ModelConfig

_TIME_IDS = 6
"""Numbers about the size of an image, of networks with a pooled embedding."""


def dry_inputs(model: ModelConfig, names: Collection[str], samples: int) -> tuple[Tensor, Condition]:
    """Return noisy latents ``[samples, C, H, W]`` and the conditions of a network, all zero.

    Args:
        model: shape of the network.
        names: names of its conditions (``BlockwiseModel.inputs``).
        samples: rows of each input.
    """
    condition: Condition = {
        "label": torch.zeros(samples, dtype=torch.int64),
        "position": torch.arange(samples),
        "time_ids": torch.zeros(samples, _TIME_IDS),
        "low_res": torch.zeros(samples, model.channels, model.low_res_size, model.low_res_size),
        **{name: torch.zeros(samples, width) for name, width in model.text_widths.items() if name != "context"},
        **{n: torch.zeros(samples, CAPTION_TOKENS, w) for n, w in model.text_widths.items() if n == "context"},
    }
    absent = set() if model.low_res_size else {"low_res"}
    absent |= set() if "pooled" in model.text_widths else {"time_ids"}
    noisy = torch.zeros(samples, model.channels, model.size, model.size)
    return noisy, {name: value for name, value in condition.items() if name in names and name not in absent}
