"""Norm and clipping of the gradient under ZeRO-1 to 3, with one read by the host.

DeepSpeed casts each gradient to fp64 and takes its norm alone, after it has searched it for infinities and NaN, and
reads the device two or three times. Here the norms of all gradients are one operation, without a cast. A gradient that
is not finite makes the norm infinite or NaN; its square is summed over the ranks, so that all of them skip the step.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from fastdiff.training.optimizer.clipping import clip_factor, norm_of


def take_norm_at_once(wrapper: Any, norm: Callable[[], Tensor] | None = None) -> None:
    """Replace norm, search for infinities and clipping of DeepSpeed's optimizer at stage 1, 2 or 3.

    With an optimizer on the CPU DeepSpeed adds up the norm during the backward pass; that stays as it is.

    Args:
        wrapper: the optimizer.
        norm: returns the norm of the gradients of all ranks, times the scale of the loss; None: of those that
            DeepSpeed has added up.
    """
    if getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False):
        return
    wrapper.check_overflow = lambda **_: None  # ``step`` checks the norm
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        wrapper.scaled_global_norm = norm or partial(_norm_over_ranks, wrapper, wrapper.bit16_groups)
        wrapper.unscale_and_clip_grads = partial(_unscale_and_clip, wrapper)
    else:
        norm = norm or partial(_norm_over_ranks, wrapper, wrapper.fp16_groups)
        wrapper._get_norm_groups = lambda: [norm()]
        flats = wrapper.fp32_partitioned_groups_flat
        wrapper.unscale_and_clip_grads = lambda group, norm: _unscale_and_clip(wrapper, [flats[group].grad], norm)


def _norm_over_ranks(wrapper: Any, groups: Sequence[Any]) -> Tensor:
    """Return the norm of the gradients of all ranks, times the scale of the loss."""
    gradients = [
        gradient
        for group in range(len(groups))
        for gradient in wrapper.averaged_gradients[group]
        if not getattr(gradient, "_zero_padding", False)
    ]
    # With few parameters a rank may have no part of any.
    square = norm_of(gradients).square() if gradients else torch.zeros((), device=wrapper.device)
    if torch.distributed.get_world_size(wrapper.dp_process_group) > 1:
        torch.distributed.all_reduce(square, group=wrapper.dp_process_group)
    return square.sqrt()


def _unscale_and_clip(wrapper: Any, gradients: Iterable[Tensor], norm: Tensor) -> None:
    """Multiply flat gradients by what clips them and undoes the scale of the loss."""
    scale, limit = wrapper.loss_scale, wrapper.clip_grad
    if limit == 0.0 and scale == 1.0:
        return
    factor = clip_factor(norm, limit, scale) if limit > 0.0 else 1.0 / scale
    for gradient in gradients:
        gradient.mul_(factor)
