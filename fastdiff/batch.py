"""The types between data, objective and model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastdiff.conditions import BITS, CONDITIONS, MASK_OF, StoredDtype

Condition = dict[str, Tensor]
"""Conditioning inputs of a model besides the time, as its keyword arguments: ``[B, ...]`` each, with the names, shapes
and dtypes of ``fastdiff.conditions``."""


class Outputs(NamedTuple):
    """What a network returns that predicts more than the latents."""

    latents: Tensor
    """Their prediction, ``[B, C or 2C, H, W]``."""
    token: Tensor | None = None
    """Prediction of the class token of a teacher (``ModelConfig.teacher_width``), ``[B, D]``; None: there is none."""
    projected: Tensor | None = None
    """In training, features of the patches for those of a teacher (``ModelConfig.aligned_width``), ``[B, T, K]``,
    with ``ModelConfig.aligned_token`` behind that of the class token."""


Output = Tensor | Outputs
"""Output of a network; a tensor is the prediction of the latents."""
DTYPES = {
    "floating": torch.float32,
    "float32": torch.float32,
    "int64": torch.int64,
    "int8": torch.float32,
    "bool": torch.bool,
}
"""Dtypes of the conditions of a pass without data, by ``ConditionKind.dtype``."""


def to_stored(values: Tensor, dtype: StoredDtype) -> Tensor:
    """Return values in the dtype of their column, or their bits as integers; NaN where float8 has no such number."""
    kind: torch.dtype = getattr(torch, dtype)
    if dtype not in BITS:
        return values.to(kind)
    # The conversion to float8 would clip larger numbers.
    clipped = values.masked_fill(values.abs() > torch.finfo(kind).max, torch.nan)
    return clipped.to(kind).view(getattr(torch, BITS[dtype]))


def as_numbers(stored: Tensor) -> Tensor:
    """Return latents or features that shards hold: bits of bfloat16 as these numbers, others as they are."""
    return stored.view(torch.bfloat16) if stored.dtype == torch.uint16 else stored


def from_stored(stored: Mapping[str, Tensor]) -> Condition:
    """Return conditions as a network takes them, from those that shards hold.

    Masks become bool, bits of bfloat16 these numbers, and bits of float8 the same numbers in bfloat16.
    """
    return {name: _taken(name, value) for name, value in stored.items()}


def _taken(name: str, value: Tensor) -> Tensor:
    match CONDITIONS[name].dtype, value.dtype:
        case "bool", _:
            return value.to(torch.bool)
        case "floating", torch.uint16:
            return as_numbers(value)
        case "floating", torch.uint8:
            return value.view(torch.float8_e4m3fn).to(torch.bfloat16)
    return value


def split(output: Output) -> Outputs:
    """Return the parts of an output."""
    return Outputs(output) if isinstance(output, Tensor) else Outputs(*output)


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
    mask: Tensor | None = None
    """``[B, H, W]`` fp16, weight of each latent position in the loss, 0 to 1; None: 1."""
    data_set: Tensor | None = None
    """``[B]`` int64, number of the data set of each sample, of a run on several; None: it has one."""

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, for messages by name."""
        conditions = {f"condition {name}": value for name, value in self.condition.items()}
        optional = {"mask": self.mask, "data_set": self.data_set}
        present = {name: value for name, value in optional.items() if value is not None}
        return {"latents": self.latents, "position": self.position, **conditions, **present}
