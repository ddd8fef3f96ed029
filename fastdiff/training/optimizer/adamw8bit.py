"""AdamW with 8-bit moments: its state under DeepSpeed, and its update in the flat engine.

On a CPU plain torch and the compiled update get their numbers and the answer to skip from the host.
"""

from collections.abc import Mapping, Sequence

import torch

from fastdiff.config.optimizers.adamw import ADAMW8BIT, AdamWConfig
from fastdiff.parallel.fragments import Flat
from fastdiff.parallel.world import World
from fastdiff.training.buffers import Gradients, Part
from fastdiff.training.optimizer.adamw import NUMBERS, numbers_of_step, send
from fastdiff.training.optimizer.update import Update
from fastdiff_kernels.adamw8bit import AdamW8bit
from fastdiff_kernels.adamw8bit.blocks import build_blocks
from fastdiff_kernels.adamw8bit.kernels import adamw8bit
from fastdiff_kernels.adamw8bit.reference import DeviceStep, Extras, Moments, Step, with_shrink
from fastdiff_kernels.dispatch import choose

_STATE = tuple(tensor.name for tensor in ADAMW8BIT.state)


def create_state(optimizer: AdamW8bit, flats: Sequence[Flat], world: World) -> None:
    """Create the moments of the slices that DeepSpeed gave this rank; called by all ranks."""
    # NCCL cannot access host memory, where ZeRO's offload keeps the state.
    offloaded = world.device.type == "cuda" and any(flat.key.device.type == "cpu" for flat in flats)
    group = torch.distributed.new_group(backend="gloo") if offloaded else None
    optimizer.cut({flat.key: flat.fragments for flat in flats}, group)


class AdamW8bitUpdate(Update):
    """AdamW with 8-bit moments; see ``Update`` for the arguments."""

    config: AdamWConfig

    def __init__(self, config: AdamWConfig, parts: Sequence[Part], gradients: Gradients) -> None:
        super().__init__(config, parts, gradients)
        device, chosen = gradients.buffer.device, choose("adamw8bit", parts[0].flat.master)
        self.by_host = device.type == "cpu" and chosen in ("reference", "compile")
        self._numbers = {part.lr_multiplier: torch.zeros(NUMBERS, device=device) for part in parts}
        self._step: dict[float, Step | DeviceStep] = {}
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        self._blocks = [build_blocks(part.flat.fragments, device) for part in parts]

    def _send(self, number: int, lrs: Mapping[float, float], shares: Sequence[float]) -> None:
        self._number.fill_(number)
        for multiplier, lr in lrs.items():
            numbers = with_shrink(numbers_of_step(self.config, number, lr, multiplier))
            sent = self._numbers[multiplier] = send([*numbers, *shares], self._numbers[multiplier])
            beta1, _, beta2, _, shrink, rate, correction, eps = numbers
            self._step[multiplier] = DeviceStep(number=self._number, numbers=sent[:NUMBERS])
            if self.by_host:
                self._step[multiplier] = Step(
                    number=number, beta1=beta1, beta2=beta2, shrink=shrink, rate=rate, correction=correction, eps=eps
                )

    def _move(self) -> None:
        for index, (part, blocks) in enumerate(zip(self.parts, self._blocks, strict=True)):
            averages = self.own_averages(index)
            extras = Extras(
                grad_scale=self.factor,
                copy=part.copy,
                averages=averages,
                shares=self._numbers[part.lr_multiplier][NUMBERS:] if averages else None,
                skip=None if self.by_host else self.skip,
            )
            moments = Moments(*(part.flat.state[name] for name in _STATE))
            adamw8bit(part.flat.master, part.grad, moments, blocks, self._step[part.lr_multiplier], extras)
