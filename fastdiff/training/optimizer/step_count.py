"""The count of its steps that an optimizer keeps in its state."""

from typing import Any

import torch

from fastdiff.config.optimizers.family import OptimizerFamily


def step_count(family: OptimizerFamily, applied: int, device: torch.device) -> dict[str, Any]:
    """Return the entry ``step`` of a state on ``device`` after ``applied`` steps; empty: the optimizer counts none."""
    if family.counts is None:
        return {}
    return {"step": torch.tensor(float(applied), device=device) if family.counts == "tensor" else applied}
