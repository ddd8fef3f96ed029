"""One update of flat buffers: unscaled and clipped gradient, optimizer, averages and the copy in 16 bits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.parallel.fragments import Shapes
from fastdiff.parallel.world import World
from fastdiff.training.buffers import Part
from fastdiff.training.ema import Ema
from fastdiff.training.optimizer.build import create_state
from fastdiff.training.optimizer.clipping import norm_of
from fastdiff.training.optimizer.empty_state import empty_state
from fastdiff_kernels.adamw.norm import clip, norm


class Update(ABC):
    """The update of all parts by one optimizer (``OptimizerFamily.flat_update``); ``views``: gradient by parameter."""

    by_host: bool
    """Whether the host waits for the answer to skip the step, and takes the norm parameter by parameter as ZeRO does;
    otherwise kernels read the answer on the device."""

    def __init__(self, config: OptimConfig, parts: Sequence[Part], views: Sequence[Tensor]) -> None:
        self.config = config
        self.parts, self._views = parts, views
        self.averages: Ema | None = None
        """Those that the update moves."""
        self.norm: Tensor | None = None
        """Of the last gradient before clipping, a scalar on the device; None before the first step."""

    def create_state(self, optimizer: torch.optim.Optimizer, shapes: Shapes, world: World) -> None:
        """Create the optimizer's state of every part, as its family declares it; called once by all ranks."""
        family = family_of(self.config)
        for flat in (part.flat for part in self.parts):
            flat.states[flat.key] = empty_state(family, flat, shapes)

    def examine(self, gradient: Tensor) -> Tensor:
        """Take the norm of the flat gradient; return whether the step is skipped, a scalar on the device."""
        self.norm = norm_of(self._views).square().sqrt() if self.by_host else norm(gradient)
        self.factor, self.skip = clip(self.norm, self.config.clip)
        return self.skip

    @torch.no_grad()
    def take(self, number: int, lr: float, applied: int) -> None:
        """Update every part, unless skipped; ``number`` from 1; the averages have the shares of ``applied`` steps."""
        if not (self.by_host and self.skip):
            self._take(number, lr, [] if self.averages is None else self.averages.shares(applied))

    @abstractmethod
    def _take(self, number: int, lr: float, shares: Sequence[float]) -> None:
        """Update every part; ``shares``: by which the averages move to the weights."""

    def count(self, steps: int) -> None:
        """Record in the state of every part how many steps the optimizer has taken."""
        for part in self.parts:
            part.flat.state["step"] = steps

    def clipped(self, part: Part) -> Tensor:
        """Return the gradient of a part, fp32 ``[N]``; it may be clipped in place."""
        gradient = part.grad.float()
        return gradient if self.config.clip == 0 else gradient.mul_(self.factor)

    def own_averages(self, index: int) -> list[Tensor]:
        """Return the averages of a part that this rank owns."""
        if self.averages is None:
            return []
        return [own for averages in self.averages.averages.values() if (own := averages[index]) is not None]

    def follow(self, index: int, shares: Sequence[float]) -> None:
        """Move the averages of a part, and round its copy, after its weights have changed."""
        part = self.parts[index]
        for average, share in zip(self.own_averages(index), shares, strict=False):  # none if another rank owns them
            average.lerp_(part.flat.master, share)
        if part.copy is not None:
            part.copy.copy_(part.flat.master)


class StepUpdate(Update):
    """The update of an optimizer without a kernel for flat buffers: its own ``step``, for which the host waits."""

    by_host = True

    def create_state(self, optimizer: torch.optim.Optimizer, shapes: Shapes, world: World) -> None:
        """Create the state as under DeepSpeed."""
        self._optimizer = optimizer
        create_state(optimizer, family_of(self.config), [part.flat for part in self.parts], shapes, world)

    def _take(self, number: int, lr: float, shares: Sequence[float]) -> None:
        for part in self.parts:
            part.flat.key.grad = self.clipped(part)
        self._optimizer.step()
        for index, part in enumerate(self.parts):
            part.flat.key.grad = None
            self.follow(index, shares)

    def count(self, steps: int) -> None:
        """Leave it to the optimizer."""
