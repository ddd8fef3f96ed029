"""AdamW in the flat engine: with averages and the copy in 16 bits, in one pass over memory.

On a GPU this is one kernel per ``Part``, which reads on the device whether the step is skipped. On a CPU, whose host
has the answer at hand, AdamW is torch's own and rounds as it does under DeepSpeed: its numbers are not rounded to fp32.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.training.buffers import Gradients, Part
from fastdiff.training.optimizer.build import decay_of
from fastdiff.training.optimizer.update import Update
from fastdiff_kernels.adamw import adamw, step_numbers
from fastdiff_kernels.dispatch import choose

NUMBERS = 8
"""Numbers of a step that are not shares of averages."""


class AdamWUpdate(Update):
    """AdamW with fp32 moments; see ``Update`` for the arguments."""

    config: AdamWConfig

    def __init__(self, config: AdamWConfig, parts: Sequence[Part], gradients: Gradients) -> None:
        super().__init__(config, parts, gradients)
        device, chosen = gradients.buffer.device, choose("adamw", parts[0].flat.master)
        self.by_host = device.type == "cpu" and chosen == "reference"
        self._numbers = {part.lr_multiplier: torch.zeros(NUMBERS, device=device) for part in parts}

    def _send(self, number: int, lrs: Mapping[float, float], shares: Sequence[float]) -> None:
        if self.by_host:
            self._step = number, lrs, shares
            return
        for multiplier, lr in lrs.items():
            numbers = numbers_of_step(self.config, number, lr, multiplier)
            self._numbers[multiplier] = send([*numbers, *shares], self._numbers[multiplier])

    def _move(self) -> None:
        for index, part in enumerate(self.parts):
            if self.by_host:
                self._take_on_cpu(index, part, *self._step)
            else:
                self._take_on_device(index, part)

    def _take_on_device(self, index: int, part: Part) -> None:
        state, averages = part.flat.state, self.own_averages(index)
        sent = self._numbers[part.lr_multiplier]
        adamw(
            part.flat.master, part.grad, state["exp_avg"], state["exp_avg_sq"], sent[:NUMBERS],
            self.factor, self.skip, part.copy, averages, sent[NUMBERS:] if averages else None,
        )  # fmt: skip

    def _take_on_cpu(
        self, index: int, part: Part, number: int, lrs: Mapping[float, float], shares: Sequence[float]
    ) -> None:
        state, config, multiplier = part.flat.state, self.config, part.lr_multiplier
        numbers = [torch.tensor(float(number))]
        torch._fused_adamw_(
            [part.flat.master], [self.clipped(part)], [state["exp_avg"]], [state["exp_avg_sq"]], [],
            numbers, amsgrad=False, lr=lrs[multiplier], beta1=config.betas[0], beta2=config.betas[1],
            weight_decay=decay_of(config, multiplier), eps=config.eps, maximize=False,
        )  # fmt: skip
        self.follow(index, shares)


def numbers_of_step(config: AdamWConfig, number: int, lr: float, multiplier: float) -> tuple[float, ...]:
    """Return the numbers of a step (``step_numbers``) for parameters whose learning rate has this multiplier."""
    return step_numbers(number, lr, config.betas, config.eps, decay_of(config, multiplier))


def send(values: Sequence[float], held: Tensor) -> Tensor:
    """Copy the numbers of a step to the device of ``held``, in its order and without waiting for it.

    Returns:
        fp32 ``[len(values)]``: ``held``, if it has this size.
    """
    if held.numel() != len(values):
        held = torch.zeros(len(values), device=held.device)
    return held.copy_(torch.tensor(values, dtype=torch.float32, pin_memory=held.is_cuda), non_blocking=True)
