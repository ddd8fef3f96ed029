"""One update of flat buffers: unscaled and clipped gradient, optimizer, averages and the copy in 16 bits.

A CUDA graph can hold it if kernels read on the device whether the step is skipped: the numbers of a step, which come
from the host, then enter through tensors that stay where they are. An optimizer's own ``step`` waits for the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.models.fused import Matrices
from fastdiff.parallel.fragments import Shapes
from fastdiff.parallel.world import World
from fastdiff.training.buffers import Gradients, Part
from fastdiff.training.ema import Ema
from fastdiff.training.optimizer.build import create_state
from fastdiff.training.optimizer.clipping import ParameterNorms
from fastdiff.training.optimizer.empty_state import empty_state
from fastdiff.training.optimizer.exact_norm import ExactNorm
from fastdiff_kernels.adamw.norm import ArrivingNorm, clip

Captured = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes work of the device alone run as a CUDA graph, once its kernels are loaded."""


class Update(ABC):
    """The update of all parts by one optimizer (``OptimizerFamily.flat_update``) with the gradients of a step."""

    by_host: bool
    """Whether the host waits for the answer to skip the step, and takes the norm parameter by parameter as ZeRO does;
    otherwise kernels read the answer on the device."""

    def __init__(self, config: OptimConfig, parts: Sequence[Part], gradients: Gradients) -> None:
        self.config = config
        self.parts, self._gradients = parts, gradients
        self.averages: Ema | None = None
        """Those that the update moves."""
        self.norm: Tensor | None = None
        """Of the last gradient before clipping, a scalar on the device; None before the first step."""
        self._static: tuple[Tensor, Tensor] | None = None
        """Where a CUDA graph finds factor and answer of a step; None without one."""
        self._replay: Callable[[], None] | None = None

    def create_state(self, optimizer: torch.optim.Optimizer, shapes: Shapes, matrices: Matrices, world: World) -> None:
        """Create the optimizer's state of every part, as its family declares it; called once by all ranks."""
        family = family_of(self.config)
        for flat in (part.flat for part in self.parts):
            flat.states[flat.key] = empty_state(family, flat, shapes, matrices)

    def capture(self, captured: Captured) -> None:
        """Let a CUDA graph hold the work of the device, where the host has no part in it."""
        if not self.by_host:
            device = self._gradients.buffer.device
            self._static = torch.ones((), device=device), torch.zeros((), dtype=torch.bool, device=device)
            self._replay = captured(self._move)

    @cached_property
    def norms(self) -> ParameterNorms | ArrivingNorm | ExactNorm:
        """Takes the norm of a gradient; an engine may set another before the first step."""
        gradients = self._gradients
        return ParameterNorms(gradients.views, gradients.ends) if self.by_host else ArrivingNorm(gradients.buffer)

    def examine(self, arrived: Iterable[int]) -> Tensor:
        """Take the norm of the flat gradient; return whether the step is skipped, a scalar on the device.

        Args:
            arrived: how many elements of the gradient are there, each time that more are; at last all.
        """
        for end in arrived:
            self.norms.add(end)
        self.norm = self.norms.take()
        self.factor, self.skip = clip(self.norm, self.config.clip)
        if self._static is not None:
            for held, found in zip(self._static, (self.factor, self.skip), strict=True):
                held.copy_(found)
            self.factor, self.skip = self._static
        return self.skip

    @torch.no_grad()
    def take(self, number: int, lrs: Mapping[float, float], applied: int) -> None:
        """Update every part, unless skipped.

        Args:
            number: of the step, from 1.
            lrs: learning rates by the multipliers of the parts.
            applied: steps by which the averages have their shares.
        """
        if not (self.by_host and self.skip):
            self._send(number, lrs, [] if self.averages is None else self.averages.shares(applied))
            (self._replay or self._move)()

    @abstractmethod
    def _send(self, number: int, lrs: Mapping[float, float], shares: Sequence[float]) -> None:
        """Put the numbers of a step where ``_move`` finds them; ``shares``: by which averages move to the weights."""

    @abstractmethod
    def _move(self) -> None:
        """Update every part by these numbers; unless ``by_host``, by the device alone."""

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

    def create_state(self, optimizer: torch.optim.Optimizer, shapes: Shapes, matrices: Matrices, world: World) -> None:
        """Create the state as under DeepSpeed."""
        self._optimizer = optimizer
        create_state(optimizer, family_of(self.config), [part.flat for part in self.parts], shapes, matrices, world)

    def _send(self, number: int, lrs: Mapping[float, float], shares: Sequence[float]) -> None:
        self._shares = shares

    def _move(self) -> None:
        for part in self.parts:
            part.flat.key.grad = self.clipped(part)
        self._optimizer.step()
        for index, part in enumerate(self.parts):
            part.flat.key.grad = None
            self.follow(index, self._shares)

    def count(self, steps: int) -> None:
        """Leave it to the optimizer."""
