"""AdamW in the flat engine: with averages and the copy in 16 bits, in one pass over memory.

On a GPU this is one kernel per ``Part``, which reads on the device whether the step is skipped. On a CPU, whose host
has the answer at hand, AdamW is torch's own and rounds as it does under DeepSpeed: its numbers are not rounded to fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.config.optimizers.adamw import AdamWConfig
from fastdiff.training.buffers import Gradients, Part
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
        self._numbers = torch.zeros(NUMBERS, device=device)

    def _send(self, number: int, lr: float, shares: Sequence[float]) -> None:
        if self.by_host:
            self._step = number, lr, shares
            return
        config = self.config
        numbers = step_numbers(number, lr, config.betas, config.eps, config.weight_decay)
        self._numbers = send([*numbers, *shares], self._numbers)

    def _move(self) -> None:
        for index, part in enumerate(self.parts):
            if self.by_host:
                self._take_on_cpu(index, part, *self._step)
            else:
                self._take_on_device(index, part)

    def _take_on_device(self, index: int, part: Part) -> None:
        state, averages = part.flat.state, self.own_averages(index)
        adamw(
            part.flat.master, part.grad, state["exp_avg"], state["exp_avg_sq"], self._numbers[:NUMBERS],
            self.factor, self.skip, part.copy, averages, self._numbers[NUMBERS:] if averages else None,
        )  # fmt: skip

    def _take_on_cpu(self, index: int, part: Part, number: int, lr: float, shares: Sequence[float]) -> None:
        state, config = part.flat.state, self.config
        numbers = [torch.tensor(float(number))]
        torch._fused_adamw_(
            [part.flat.master], [self.clipped(part)], [state["exp_avg"]], [state["exp_avg_sq"]], [],
            numbers, amsgrad=False, lr=lr, beta1=config.betas[0], beta2=config.betas[1],
            weight_decay=config.weight_decay, eps=config.eps, maximize=False,
        )  # fmt: skip
        self.follow(index, shares)


def send(values: Sequence[float], held: Tensor) -> Tensor:
    """Copy the numbers of a step to the device of ``held``, in its order and without waiting for it.

    Returns:
        fp32 ``[len(values)]``: ``held``, if it has this size.
    """
    if held.numel() != len(values):
        held = torch.zeros(len(values), device=held.device)
    return held.copy_(torch.tensor(values, dtype=torch.float32, pin_memory=held.is_cuda), non_blocking=True)
