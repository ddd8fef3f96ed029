"""Optimizers and the learning-rate schedule."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from fastdiff.config.optimizers.family import BYTES, OptimizerFamily
from fastdiff.config.optimizers.registry import family_of, is_built_in, optimizer_class
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.errors import ConfigError, require
from fastdiff.models.cost.memory import exhausted
from fastdiff.models.fused import Matrices
from fastdiff.parallel.fragments import Flat, Shapes
from fastdiff.parallel.world import World
from fastdiff.plugins.user_code import faults_of
from fastdiff.training.optimizer.clipping import clip_factor, norm_of
from fastdiff.training.optimizer.lr_schedule import lr_factor
from fastdiff.training.optimizer.owners import OverRanks
from fastdiff.training.optimizer.whole_matrices import WholeMatrices

MULTIPLIER = "lr_multiplier"
"""Key in a parameter group: the factor of the learning rate of the run."""
_TABLES = "qmap"
"""Prefix of the constant quantization tables of bitsandbytes."""


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
        if hasattr(self, "grad_scale"):  # it scales in its own pass over the gradients
            self.grad_scale = factor
        else:
            torch._foreach_mul_(gradients, factor)


def build_optimizer(
    parameters: Iterable[Tensor],
    config: OptimConfig,
    *,
    skip_non_finite: bool,
    multipliers: Iterable[float] | None = None,
    in_order: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer that ``config`` names.

    Args:
        parameters: the trainable ones.
        config: name, hyper-parameters and clip.
        skip_non_finite: clip and check for finite gradients in the optimizer itself (ZeRO-0 in fp32).
        multipliers: of the learning rate, by parameter (``ModelConfig.lr_multiplier``); each has a group. None: 1.
        in_order: with the same bits however the parameters are cut (``OptimizerFamily.ordered_arguments``).

    Raises:
        ConfigError: its class cannot be imported, does not take the hyper-parameters, or raises an exception.
    """
    family = family_of(config)
    base: type[torch.optim.Optimizer] = optimizer_class(config)
    if family.whole_matrices and not issubclass(base, OverRanks):
        require(
            family.matrix_step is None,
            f"--optim.name {family.name} asks for the matrices of a network, and {family.optimizer} does not derive "
            f"from {OverRanks.__module__}.{OverRanks.__name__}, which gives them; derive it from that class",
        )
        base = type(f"Whole{base.__name__}", (WholeMatrices,), {"of": base})
    if skip_non_finite:
        base = type(f"Guarded{base.__name__}", (SkipNonFinite, base), {"clip": config.clip})
    arguments: dict[str, Any] = {**config.hyper_parameters(), **family.arguments}
    arguments |= (family.ordered_arguments if in_order else None) or {}
    what = f"--optim.name {family.name}: {family.optimizer}"
    with nullcontext() if is_built_in(family) else faults_of(what, exhausted):
        return base(parameters if multipliers is None else _groups(parameters, multipliers, config), **arguments)


def _groups(
    parameters: Iterable[Tensor], multipliers: Iterable[float], config: OptimConfig
) -> Iterable[Tensor] | list[dict[str, Any]]:
    """Return the parameters by multiplier, in the order of the first of each; one group has no numbers of its own."""
    found: dict[float, list[Tensor]] = {}
    for parameter, multiplier in zip(parameters, multipliers, strict=True):
        found.setdefault(multiplier, []).append(parameter)
    if found.keys() == {1.0}:
        return found[1.0]
    return [
        {"params": tensors, MULTIPLIER: multiplier, **numbers_of_group(config, multiplier)}
        for multiplier, tensors in found.items()
    ]


def numbers_of_group(config: OptimConfig, multiplier: float) -> dict[str, float]:
    """Return the learning rate after the warm-up and the weight decay of a parameter group, by its multiplier."""
    return {"lr": config.lr * multiplier, "weight_decay": decay_of(config, multiplier)}


def decay_of(config: OptimConfig, multiplier: float) -> float:
    """Return the weight decay of parameters whose learning rate has this multiplier.

    A step multiplies weights by 1 - lr * weight_decay. That is the same for all of them, as in the package mup.
    """
    return config.weight_decay / multiplier


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


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group to ``lr`` times its multiplier, before there is a schedule."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(MULTIPLIER, 1.0)
        group.pop("initial_lr", None)


def base_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of parameters whose multiplier is 1, also where there is none."""
    group = max(optimizer.param_groups, key=lambda group: group.get(MULTIPLIER, 1.0) == 1.0)
    return float(group["lr"] / group.get(MULTIPLIER, 1.0))


def lrs_of(optimizer: torch.optim.Optimizer) -> dict[float, float]:
    """Return the learning rate of each group, by its multiplier."""
    return {group.get(MULTIPLIER, 1.0): float(group["lr"]) for group in optimizer.param_groups}


def lr_after(config: OptimConfig, steps: int, applied: int) -> float:
    """Return the learning rate of the step after ``applied`` of ``steps`` steps, from the configuration alone."""
    return config.lr * lr_factor(config, steps)(applied)


def forget(state: dict[str, Any]) -> None:
    """Reset the optimizer state of one tensor to that before the first step, in place.

    DeepSpeed keeps views of the state: new tensors would leave the old ones in memory.
    """
    for key, value in state.items():
        if key == "step":
            state[key] = value * 0  # a number, or a tensor
        elif isinstance(value, Tensor) and not key.startswith(_TABLES):
            value.zero_()


def create_state(
    optimizer: torch.optim.Optimizer,
    family: OptimizerFamily,
    flats: Sequence[Flat],
    shapes: Shapes,
    matrices: Matrices,
    world: World,
) -> None:
    """Create the state of an optimizer that does not wait for its first step, and check it; called by all ranks.

    Raises:
        ConfigError: see ``check_state``.
    """
    if isinstance(optimizer, OverRanks):
        optimizer.lay_out(family, flats, shapes, matrices, world)
    elif family.create_state is not None:
        resolve_name(family.create_state)(optimizer, flats, world)
        check_state(family, flats)


def check_state(family: OptimizerFamily, flats: Iterable[Flat]) -> None:
    """Raise ConfigError unless the state has the bytes per element that its family declares.

    Libraries silently fall back to fp32 state (odd sizes, unsupported devices); then the memory plan is wrong.
    bitsandbytes keeps tensors below 4096 elements in fp32 when they are optimized one by one (ZeRO-0), by design.
    """
    for flat in flats:
        if flat.master.numel() < family.smallest:
            continue
        held = [(flat.state.get(one.name), BYTES[one.dtype], one.of == "all") for one in family.elements]
        if any(
            m is None or m.element_size() != size or (whole and m.numel() != flat.master.numel())
            for m, size, whole in held
        ):
            found = [None if m is None else (str(m.dtype), m.numel()) for m, *_ in held]
            first = flat.fragments[0].name if flat.fragments else "padding"
            size = "one byte" if family.bits == 8 else f"{family.bits // 8} bytes"
            raise ConfigError(
                f"--optim.name {family.name}: the moments of {first} are kept in {found}, expected {size} for "
                f"each of {flat.master.numel()} elements; {family.remedy}"
            )
