"""Checks of the tensors of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise ValueError unless ``tensor`` has this shape, one of these dtypes and this device, contiguous."""
    right = tensor.dtype in dtypes and tuple(tensor.shape) == shape and tensor.device == device
    if right and tensor.is_contiguous():
        return  # nothing is formatted in a step
    given = f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
    if right:
        raise ValueError(f"{given} has strides {tensor.stride()}, expected it to be contiguous; use .contiguous()")
    expected = " or ".join(str(dtype) for dtype in dtypes)
    raise ValueError(f"{given}, expected {expected} of shape {shape} on {device}")


def check_averages(averages: Sequence[Tensor], shares: Tensor | None, param: Tensor) -> None:
    """Raise ValueError unless every average is fp32 of the shape of ``param`` and has one of the fp32 ``shares``."""
    for index, average in enumerate(averages):
        check(f"averages[{index}]", average, tuple(param.shape), (torch.float32,), param.device)
    if shares is not None:
        check("shares", shares, (len(averages),), (torch.float32,), param.device)
    elif averages:
        raise ValueError(f"{len(averages)} averages without shares, expected shares, fp32 of shape ({len(averages)},)")


def check_skip(skip: Tensor, device: torch.device) -> None:
    """Raise ValueError unless ``skip`` is a bool or fp32 scalar on ``device``."""
    check("skip", skip, (), (torch.bool, torch.float32), device)
