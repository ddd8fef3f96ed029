"""Optimizers and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from fastdiff.config import OptimConfig
from fastdiff.errors import ConfigError
from fastdiff.fragments import Flat


class SkipNonFinite:
    """Clips the gradient and skips the step if it is not finite: what ZeRO's wrappers do, for plain ZeRO-0.

    Mixed in before a ``torch.optim.Optimizer``. It reports as ZeRO's wrappers report, through ``overflow`` and
    ``_global_grad_norm``, and like them it reads one flag from the device per step.
    """

    param_groups: list[dict[str, Any]]
    clip: float
    overflow = False
    _global_grad_norm: Tensor | None = None

    def step(self, closure: None = None) -> None:
        """Take the step unless the norm of the gradient is NaN or infinite."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip if self.clip > 0 else float("inf"))
        self._global_grad_norm = norm
        self.overflow = not torch.isfinite(norm).item()
        if not self.overflow:
            super().step(closure)  # type: ignore[misc]


def build_optimizer(
    parameters: Iterable[Tensor], config: OptimConfig, *, skip_non_finite: bool
) -> torch.optim.Optimizer:
    """Return the optimizer that ``config`` names.

    Args:
        parameters: what to optimize.
        config: name, learning rate, betas, eps, weight decay, clip.
        skip_non_finite: clip and check for finite gradients in the optimizer itself (ZeRO-0 in fp32).
    """
    base = _optimizer_class(config.name)
    if skip_non_finite:
        base = type(f"Guarded{base.__name__}", (SkipNonFinite, base), {"clip": config.clip})
    return base(parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)  # type: ignore[call-arg]


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    if name == "adamw":
        return torch.optim.AdamW
    import bitsandbytes  # only where it is asked for: it looks for CUDA libraries on import

    return bitsandbytes.optim.AdamW8bit  # type: ignore[no-any-return]


def build_lr_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, steps: int) -> LambdaLR:
    """Return the schedule of ``transformers.get_scheduler`` over ``steps`` applied optimizer steps."""
    from transformers import get_scheduler  # takes seconds

    schedule = get_scheduler(config.schedule, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps)
    if not isinstance(schedule, LambdaLR):
        raise ConfigError(f"--optim.schedule {config.schedule}: not a function of the step")
    return schedule


def set_lr_step(schedule: LambdaLR, applied: int) -> None:
    """Put ``schedule`` where it stands after ``applied`` steps."""
    schedule.last_epoch = applied
    for group, factor, base in zip(
        schedule.optimizer.param_groups, schedule.lr_lambdas, schedule.base_lrs, strict=True
    ):
        group["lr"] = base * factor(applied)


def step_count(name: str, applied: int) -> Tensor | int:
    """Return the optimizer's own step counter after ``applied`` steps, in the type that it keeps it in."""
    return torch.tensor(float(applied)) if name == "adamw" else applied


def check_is_8bit(flats: Iterable[Flat]) -> None:
    """Raise ConfigError unless the moments of every large tensor are one byte per element.

    Libraries fall back to fp32 state in silence (odd sizes, unsupported devices); then the memory plan is wrong.
    Call it after the first step, when the state exists. bitsandbytes keeps tensors below 4096 elements in fp32
    when they are optimized one by one (ZeRO-0), which is by design.
    """
    for flat in flats:
        if flat.master.numel() < 4096:
            continue
        moments = [flat.state.get(key) for key in ("state1", "state2")]
        dtypes = [getattr(moment, "dtype", None) for moment in moments]
        if dtypes != [torch.uint8, torch.uint8]:
            raise ConfigError(
                f"--optim.name adamw8bit-bnb: the optimizer state of {flat.fragments[0].name} is {dtypes}, "
                "expected uint8; use --optim.name adamw, or another version of bitsandbytes"
            )
