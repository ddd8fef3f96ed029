"""Optimizers and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from fastdiff.config.sections.optim import OptimConfig
from fastdiff.errors import ConfigError
from fastdiff.parallel.fragments import Flat
from fastdiff.parallel.world import World
from fastdiff.training.optimizer.clipping import clip_factor, norm_of
from fastdiff.training.optimizer.lr_schedule import lr_factor
from fastdiff_kernels.adamw8bit import AdamW8bit

PER_ELEMENT = ("exp_avg", "exp_avg_sq", "exp_avg_codes", "exp_avg_sq_codes")
"""Optimizer state with one entry per element of a parameter (AdamW, AdamW8bit)."""
PER_BLOCK = ("exp_avg_scales", "exp_avg_sq_scales")
"""Optimizer state with one entry per block of a parameter (AdamW8bit)."""
SLICED = {"adamw": PER_ELEMENT[:2], "adamw8bit": (*PER_ELEMENT[2:], *PER_BLOCK)}
"""State of each optimizer that is saved in slices of parameters; bitsandbytes' has none."""
_TABLES = "qmap"
"""Prefix of the constant quantization tables of bitsandbytes."""
_MOMENTS_8BIT = {"adamw8bit": ("exp_avg_codes", "exp_avg_sq_codes"), "adamw8bit-bnb": ("state1", "state2")}


class SkipNonFinite:
    """Mixin that clips the gradient and skips non-finite steps: the work of ZeRO's wrappers, for plain ZeRO-0.

    It precedes a ``torch.optim.Optimizer`` in the bases. Like ZeRO's wrappers it reports through ``overflow`` and
    ``_global_grad_norm``, and reads one flag from the device per step. Norm and factor are theirs to the bit, so that
    one rank has the same losses with and without ZeRO, up to the rounding of AdamW.
    """

    param_groups: list[dict[str, Any]]
    clip: float
    overflow = False
    _global_grad_norm: Tensor | None = None

    def step(self, closure: None = None) -> None:
        """Take the step unless the norm of the gradient is NaN or infinite."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = norm_of(gradients).square().sqrt()  # as the ranks of ZeRO add up squares
        self._global_grad_norm = norm
        self.overflow = not torch.isfinite(norm).item()
        if not self.overflow:
            self._clip(gradients, norm)
            super().step(closure)  # type: ignore[misc]

    def _clip(self, gradients: list[Tensor], norm: Tensor) -> None:
        if self.clip <= 0:
            return
        factor = clip_factor(norm, self.clip)
        if isinstance(self, AdamW8bit):  # in its own pass over the gradients
            self.grad_scale = factor
        else:
            torch._foreach_mul_(gradients, factor)


def build_optimizer(
    parameters: Iterable[Tensor], config: OptimConfig, *, skip_non_finite: bool
) -> torch.optim.Optimizer:
    """Return the optimizer that ``config`` names.

    Args:
        parameters: the trainable ones.
        config: name, learning rate, betas, eps, weight decay, clip.
        skip_non_finite: clip and check for finite gradients in the optimizer itself (ZeRO-0 in fp32).
    """
    base = _optimizer_class(config.name)
    if skip_non_finite:
        base = type(f"Guarded{base.__name__}", (SkipNonFinite, base), {"clip": config.clip})
    options: dict[str, Any] = {
        "lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay,
    }  # fmt: skip
    if config.name == "adamw":
        options["fused"] = True  # one pass over memory, without temporaries
    return base(parameters, **options)


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    if name != "adamw8bit-bnb":
        return {"adamw": torch.optim.AdamW, "adamw8bit": AdamW8bit}[name]
    import bitsandbytes  # only on request: it looks for CUDA libraries on import

    return bitsandbytes.optim.AdamW8bit  # type: ignore[no-any-return]


def build_lr_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, steps: int) -> LambdaLR:
    """Return the schedule over ``steps`` applied optimizer steps; see ``lr_factor``."""
    return LambdaLR(optimizer, lr_factor(config, steps))


def set_lr_step(schedule: LambdaLR, applied: int) -> None:
    """Set ``schedule`` and the learning rate to their state after ``applied`` steps."""
    schedule.last_epoch = applied
    for group, factor, base in zip(
        schedule.optimizer.param_groups, schedule.lr_lambdas, schedule.base_lrs, strict=True
    ):
        group["lr"] = base * factor(applied)


def lr_after(config: OptimConfig, steps: int, applied: int) -> float:
    """Return the learning rate of the step after ``applied`` of ``steps`` steps, from the configuration alone."""
    return config.lr * lr_factor(config, steps)(applied)


def step_count(name: str, applied: int, device: torch.device) -> Tensor | int:
    """Return the optimizer's own step counter after ``applied`` steps, as it keeps it for a parameter on ``device``."""
    return torch.tensor(float(applied), device=device) if name == "adamw" else applied


def forget(state: dict[str, Any]) -> None:
    """Reset the optimizer state of one tensor to that before the first step, in place.

    DeepSpeed keeps views of the state: new tensors would leave the old ones in memory.
    """
    for key, value in state.items():
        if key == "step":
            state[key] = value * 0  # a number, or a tensor
        elif isinstance(value, Tensor) and not key.startswith(_TABLES):
            value.zero_()


def create_8bit_state(optimizer: torch.optim.Optimizer, name: str, flats: Sequence[Flat], world: World) -> None:
    """Create the state of an 8-bit optimizer on all ranks, and check that it is 8-bit; a no-op for others.

    Raises:
        ConfigError: see ``check_is_8bit``.
    """
    if isinstance(optimizer, AdamW8bit):
        # NCCL cannot access host memory, where ZeRO's offload keeps the state.
        offloaded = world.device.type == "cuda" and any(flat.key.device.type == "cpu" for flat in flats)
        group = torch.distributed.new_group(backend="gloo") if offloaded else None
        optimizer.cut({flat.key: flat.fragments for flat in flats}, group)
    elif name == "adamw8bit-bnb":
        options = optimizer.param_groups[0]
        parameters = options["params"]
        for flat in flats:
            options["params"] = [flat.key]  # bitsandbytes looks it up there; ZeRO-3 has it only during a step
            optimizer.init_state(options, flat.key, 0, 0)  # type: ignore[attr-defined]
        options["params"] = parameters
    check_is_8bit(name, flats)


def check_is_8bit(name: str, flats: Iterable[Flat]) -> None:
    """Raise ConfigError unless every moment of the optimizer called ``name`` has one byte per element.

    Libraries silently fall back to fp32 state (odd sizes, unsupported devices); then the memory plan is wrong.
    bitsandbytes keeps tensors below 4096 elements in fp32 when they are optimized one by one (ZeRO-0), by design.
    An optimizer that is not 8-bit passes.
    """
    keys = _MOMENTS_8BIT.get(name, ())
    smallest = 4096 if name == "adamw8bit-bnb" else 1
    for flat in flats:
        moments = [flat.state.get(key) for key in keys if flat.master.numel() >= smallest]
        if any(m is None or m.element_size() != 1 or m.numel() != flat.master.numel() for m in moments):
            found = [None if m is None else (str(m.dtype), m.numel()) for m in moments]
            first = flat.fragments[0].name if flat.fragments else "padding"
            raise ConfigError(
                f"--optim.name {name}: the moments of {first} are kept in {found}, expected one byte for "
                f"each of {flat.master.numel()} elements; use --optim.name adamw"
            )
