"""One update of flat buffers: unscaled and clipped gradient, AdamW, averages and the copy in 16 bits.

On a GPU this is one kernel per ``Part``, which reads on the device whether the step is skipped. On a CPU, whose host
has the answer at hand, AdamW is torch's own and rounds as it does under DeepSpeed: its numbers are not rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastdiff.config.sections.optim import OptimConfig
from fastdiff.training.ema import Ema
from fastdiff.training.engines.buffers import Part
from fastdiff.training.optimizer.clipping import norm_of
from fastdiff.training.optimizer.second_try import with_a_second_try
from fastdiff_kernels.adamw import adamw, step_numbers
from fastdiff_kernels.adamw.norm import clip, norm
from fastdiff_kernels.adamw8bit.blocks import Blocks, build_blocks
from fastdiff_kernels.adamw8bit.kernels import adamw8bit
from fastdiff_kernels.adamw8bit.reference import DeviceStep, Extras, Moments, Step, with_shrink
from fastdiff_kernels.dispatch import choose

_OWN = 8
"""Numbers of a step that are not shares of averages."""
_STATE_8BIT = ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "exp_avg_sq_scales")


class Update:
    """The update of all parts by one optimizer, whose state it creates.

    Args:
        config: of the optimizer.
        parts: all of this rank.
        views: the gradient of each parameter, views of that of the parts.
    """

    def __init__(self, config: OptimConfig, parts: Sequence[Part], views: Sequence[Tensor]) -> None:
        self._config = config
        self.use(parts, views)
        device = parts[0].grad.device
        is_8bit, chosen = config.name == "adamw8bit", choose(config.name, parts[0].flat.master)
        # On a CPU plain torch and the compiled 8-bit AdamW get their numbers and the answer to skip from the host.
        self._by_host = device.type == "cpu" and (chosen == "reference" or (is_8bit and chosen == "compile"))
        self._numbers = torch.zeros(_OWN, device=device)
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        self._blocks = [build_blocks(part.flat.fragments, device) for part in parts] if is_8bit else []
        for index, part in enumerate(parts):
            part.flat.states[part.flat.key] = self._state(index)
        self.averages: Ema | None = None
        """Those that the update moves."""
        self.norm: Tensor | None = None
        """Of the last gradient before clipping, a scalar on the device; None before the first step."""

    def use(self, parts: Sequence[Part], views: Sequence[Tensor]) -> None:
        """Take the gradients from other memory."""
        self._parts, self._views = parts, views

    def _state(self, index: int) -> dict[str, Any]:
        """Return the state of a part before the first step."""
        master = self._parts[index].flat.master
        if not self._blocks:
            return {"step": 0, "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        pieces = self._blocks[index].pieces
        shapes = [(master.numel(), torch.int8), (master.numel(), torch.uint8), *2 * [(pieces, torch.float32)]]
        tensors = [torch.zeros(size, dtype=dtype, device=master.device) for size, dtype in shapes]
        return {"step": 0, **dict(zip(_STATE_8BIT, tensors, strict=True))}

    def examine(self, gradient: Tensor) -> Tensor:
        """Take the norm of the flat gradient; return whether the step is skipped, a scalar on the device."""
        # On a CPU parameter by parameter, as under ZeRO.
        self.norm = norm_of(self._views).square().sqrt() if self._by_host else norm(gradient)
        self._factor, self._skip = clip(self.norm, self._config.clip)
        return self._skip

    @torch.no_grad()
    def take(self, number: int, lr: float, applied: int) -> None:
        """Update every part, unless the step is skipped.

        Args:
            number: of the optimizer's step, from 1.
            lr: its learning rate.
            applied: steps of the run that are applied with this one, by which the averages have their shares.
        """
        if self._by_host and self._skip:  # at hand
            return
        config, shares = self._config, [] if self.averages is None else self.averages.shares(applied)
        numbers = step_numbers(number, lr, config.betas, config.eps, config.weight_decay)
        numbers = with_shrink(numbers) if self._blocks else numbers
        if not self._by_host or self._blocks:
            self._send([*numbers, *shares], number)
        for index, part in enumerate(self._parts):
            averages = self._averages(index)
            if self._blocks:
                update = partial(self._take_8bit, part, self._blocks[index], averages, numbers, number)
            elif self._by_host:
                update = partial(self._take_on_cpu, part, averages, shares, lr, number)
            else:
                update = partial(self._take_on_device, part, averages)
            with_a_second_try(update)

    def _take_on_device(self, part: Part, averages: Sequence[Tensor]) -> None:
        state = part.flat.state
        adamw(
            part.flat.master, part.grad, state["exp_avg"], state["exp_avg_sq"], self._numbers[:_OWN],
            self._factor, self._skip, part.copy, averages, self._numbers[_OWN:] if averages else None,
        )  # fmt: skip

    def _take_on_cpu(
        self, part: Part, averages: Sequence[Tensor], shares: Sequence[float], lr: float, number: int
    ) -> None:
        state, config = part.flat.state, self._config
        gradient = part.grad.float() if config.clip == 0 else part.grad.float().mul_(self._factor)
        torch._fused_adamw_(
            [part.flat.master], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [],
            [torch.tensor(float(number))], amsgrad=False, lr=lr, beta1=config.betas[0], beta2=config.betas[1],
            weight_decay=config.weight_decay, eps=config.eps, maximize=False,
        )  # fmt: skip
        for average, share in zip(averages, shares, strict=False):  # none if another rank owns them
            average.lerp_(part.flat.master, share)
        if part.copy is not None:
            part.copy.copy_(part.flat.master)

    def _take_8bit(
        self, part: Part, blocks: Blocks, averages: Sequence[Tensor], numbers: Sequence[float], number: int
    ) -> None:
        beta1, _, beta2, _, shrink, rate, correction, eps = numbers
        step: Step | DeviceStep = DeviceStep(number=self._number, numbers=self._numbers[:_OWN])
        if self._by_host:
            step = Step(
                number=number, beta1=beta1, beta2=beta2, shrink=shrink, rate=rate, correction=correction, eps=eps
            )
        extras = Extras(
            grad_scale=self._factor,
            copy=part.copy,
            averages=averages,
            shares=self._numbers[_OWN:] if averages else None,
            skip=None if self._by_host else self._skip,
        )
        moments = Moments(*(part.flat.state[name] for name in _STATE_8BIT))
        adamw8bit(part.flat.master, part.grad, moments, blocks, step, extras)

    def _averages(self, index: int) -> list[Tensor]:
        """Return the averages of a part that this rank owns."""
        if self.averages is None:
            return []
        return [own for averages in self.averages.averages.values() if (own := averages[index]) is not None]

    def _send(self, values: Sequence[float], number: int) -> None:
        """Copy the numbers of the step to the device, in its order and without waiting for it."""
        if self._numbers.numel() != len(values):
            self._numbers = torch.zeros(len(values), device=self._numbers.device)
        host = torch.tensor(values, dtype=torch.float32, pin_memory=self._numbers.is_cuda)
        self._numbers.copy_(host, non_blocking=True)
        if self._blocks:
            self._number.fill_(number)
