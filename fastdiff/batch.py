"""The types between data, objective and model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdiff.conditions import CONDITIONS, MASK_OF

Condition = dict[str, Tensor]
"""Conditioning inputs of a model besides the time, as its keyword arguments: ``[B, ...]`` each, with the names, shapes
and dtypes of ``fastdiff.conditions``."""
DTYPES = {"floating": torch.float32, "float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
"""Dtypes of the conditions of a pass without data, by ``ConditionKind.dtype``."""


def from_stored(stored: Mapping[str, Tensor]) -> Condition:
    """Return conditions as a network takes them, from those that shards hold: masks become bool."""
    return {name: value.to(torch.bool) if CONDITIONS[name].dtype == "bool" else value for name, value in stored.items()}


def without_padding(condition: Condition) -> Condition:
    """Return embedded captions with zeros in the rows that a mask excludes, as shards have them."""
    return {
        name: value.masked_fill(~condition[mask][..., None], 0) if (mask := MASK_OF.get(name)) in condition else value
        for name, value in condition.items()
    }


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch on one rank, on the training device."""

    latents: Tensor
    """``[B, C, H, W]`` clean latents x0, normalised, or ``[B, 2C, H, W]`` mean and std of the autoencoder's posterior,
    stacked on channels; fp16, bf16 or fp32. In pixel space ``[B, C, H, W]`` uint8, which
    ``fastdiff_kernels.noising.dequantised`` converts to x0."""
    position: Tensor
    """``[B]`` int64, position of each sample in the run; it keys every random number (design 4.4)."""
    condition: Condition
