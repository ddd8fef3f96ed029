"""State of an optimizer before its first step, as its family declares it."""

from typing import Any

import torch
from torch import Tensor

from fastdiff.config.optimizers.family import OptimizerFamily, StateTensor
from fastdiff.models.fused import Matrices
from fastdiff.parallel.fragments import Flat, Shapes, Sizes


def empty_state(
    family: OptimizerFamily, flat: Flat, shapes: Shapes, matrices: Matrices, applied: int = 0
) -> dict[str, Any]:
    """Return the state of a flat tensor: zeros, and the count of ``applied`` steps.

    Args:
        family: of the optimizer.
        flat: the flat tensor.
        shapes: of all trained parameters.
        matrices: of the network.
        applied: steps that the optimizer has taken.
    """
    return step_count(family, applied, flat) | {one.name: zeros(one, flat, shapes, matrices) for one in family.state}


def zeros(tensor: StateTensor, flat: Flat, shapes: Shapes, matrices: Matrices) -> Tensor:
    """Return zeros for the entries of a flat tensor: in its shape for all elements, otherwise ``[entries]``."""
    dtype, sizes = getattr(torch, tensor.dtype), sizes_of(tensor, shapes, matrices)
    if sizes is None:
        return torch.zeros_like(flat.key, dtype=dtype)
    return torch.zeros(sum(entry.numel for entry in flat.blocks(sizes)), dtype=dtype, device=flat.key.device)


def sizes_of(tensor: StateTensor, shapes: Shapes, matrices: Matrices) -> Sizes | None:
    """Return the elements of each parameter that share an entry; None: each has its own."""
    if tensor.unit == "element" and tensor.of == "all":
        return None
    return {name: tensor.elements_per_entry(shape, matrix=name in matrices) for name, shape in shapes.items()}


def step_count(family: OptimizerFamily, applied: int, flat: Flat) -> dict[str, Any]:
    """Return the entry ``step`` of a state after ``applied`` steps; empty: the optimizer counts none."""
    if family.counts is None:
        return {}
    return {"step": torch.tensor(float(applied), device=flat.key.device) if family.counts == "tensor" else applied}
