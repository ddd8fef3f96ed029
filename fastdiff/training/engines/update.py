"""One update of flat buffers: unscaled and clipped gradient, AdamW, averages and the copy in 16 bits.

On a GPU this is one kernel per ``Part`` (``fastdiff_kernels.adamw``), which reads on the device whether the step is
skipped. On a CPU it is torch's own AdamW, whose host has the answer at hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.config.sections.optim import OptimConfig
from fastdiff.training.ema import Ema
from fastdiff.training.engines.buffers import Part
from fastdiff.training.optimizer.clipping import clip_factor, norm_of
from fastdiff_kernels.adamw import adamw, step_numbers
from fastdiff_kernels.adamw.norm import clip, norm
from fastdiff_kernels.dispatch import choose

_OWN = 8
"""Numbers of a step that are not shares of averages."""


class Update:
    """The update of all parts by one rule.

    Args:
        config: of the optimizer.
        parts: all of this rank.
        views: the gradient of each parameter, views of that of the parts.
    """

    def __init__(self, config: OptimConfig, parts: Sequence[Part], views: Sequence[Tensor]) -> None:
        self._config, self._parts, self._views = config, parts, views
        device = parts[0].grad.device
        self._by_torch = device.type == "cpu" and choose("adamw", parts[0].flat.master) == "reference"
        self._numbers = torch.zeros(0, device=device)
        self.averages: Ema | None = None
        """Those that the update moves."""
        self.norm: Tensor | None = None
        """Of the last gradient before clipping, a scalar on the device; None before the first step."""

    def examine(self, gradient: Tensor) -> Tensor:
        """Take the norm of the flat gradient; return whether the step is skipped, a scalar on the device."""
        if self._by_torch:  # parameter by parameter, as under ZeRO
            self.norm = norm_of(self._views).square().sqrt()
            self._factor = clip_factor(self.norm, self._config.clip) if self._config.clip > 0 else None
            self._skip = ~torch.isfinite(self.norm)
        else:
            self.norm = norm(gradient)
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
        shares = [] if self.averages is None else self.averages.shares(applied)
        if self._by_torch:
            if not self._skip:  # at hand
                for index, part in enumerate(self._parts):
                    self._by_torchs_own(index, part, number, lr, shares)
            return
        config = self._config
        self._send([*step_numbers(number, lr, config.betas, config.eps, config.weight_decay), *shares])
        for index, part in enumerate(self._parts):
            averages = self._averages(index)
            state = part.flat.state
            adamw(
                part.flat.master, part.grad, state["exp_avg"], state["exp_avg_sq"], self._numbers[:_OWN],
                self._factor, self._skip, part.copy, averages, self._numbers[_OWN:] if averages else None,
            )  # fmt: skip

    def _by_torchs_own(self, index: int, part: Part, number: int, lr: float, shares: Sequence[float]) -> None:
        state, config = part.flat.state, self._config
        gradient = part.grad.float() if self._factor is None else part.grad.float().mul_(self._factor)
        torch._fused_adamw_(
            [part.flat.master], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [],
            [torch.tensor(float(number))], amsgrad=False, lr=lr, beta1=config.betas[0], beta2=config.betas[1],
            weight_decay=config.weight_decay, eps=config.eps, maximize=False,
        )  # fmt: skip
        for average, share in zip(self._averages(index), shares, strict=False):
            average.lerp_(part.flat.master, share)
        if part.copy is not None:
            part.copy.copy_(part.flat.master)

    def _averages(self, index: int) -> list[Tensor]:
        """Return the averages of a part that this rank owns."""
        if self.averages is None:
            return []
        return [own for averages in self.averages.averages.values() if (own := averages[index]) is not None]

    def _send(self, values: Sequence[float]) -> None:
        """Copy the numbers of the step to the device, in its order and without waiting for it."""
        if self._numbers.numel() != len(values):
            self._numbers = torch.zeros(len(values), device=self._numbers.device)
        host = torch.tensor(values, dtype=torch.float32, pin_memory=self._numbers.is_cuda)
        self._numbers.copy_(host, non_blocking=True)
