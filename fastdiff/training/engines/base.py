"""Interface of an engine: what the loop, the guard, checkpoints and callbacks use of a model with its optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from fastdiff.batch import Output
from fastdiff.config.deepspeed import DsConfig
from fastdiff.models.fused import Matrices
from fastdiff.parallel.fragments import Flat, Fragment, Shapes
from fastdiff.parallel.world import World
from fastdiff.training.ema import Ema


class Engine(ABC):
    """A model with its optimizer.

    A step has three parts: ``check_grads``, ``optimizer_step`` and ``finish_step``. Between the first two the ranks
    begin to exchange their flags (``guard``), which the host reads after the second. ``step`` is all three.
    """

    kind: Literal["deepspeed", "flat"]
    stage: int
    """ZeRO stage."""
    ds_config: DsConfig
    """The resolved DeepSpeed JSON."""
    frozen_bytes: int
    """Bytes of the parameters that are not trained."""
    buffer_bytes: int
    shapes: Shapes
    """Of the trained parameters, by name."""
    matrices: Matrices
    """Those that the network declares, if the optimizer asks for them; otherwise none."""
    flats: list[Flat]
    """The fp32 weights of this rank, with the optimizer's state."""
    optimizer: torch.optim.Optimizer
    lr: float
    """Learning rate of the last step."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The network."""

    @abstractmethod
    def __call__(self, *inputs: Tensor, **condition: Tensor) -> Output:
        """Run the model's forward pass."""

    def rehearse(self, loss: Callable[[], Tensor], *, accumulates: bool) -> None:
        """Take a step that changes nothing, with its last micro-batch: compile, and meet the memory that a step needs.

        Weights, moments, averages, loss scale and counters stay as they are. Called by all ranks, between two steps.

        Args:
            loss: runs the forward pass and returns its loss, a scalar.
            accumulates: take another micro-batch before: the last one needs its memory beside the gradients of others.
        """
        if accumulates:
            self.backward(loss())
        self.begin_last_micro_batch()
        self.backward(loss(), discard=True)
        self.step()

    @abstractmethod
    def begin_last_micro_batch(self) -> None:
        """Make the next micro-batch the last of its step, whose backward pass reduces the gradients."""

    @abstractmethod
    def backward(self, loss: Tensor, *, discard: bool = False) -> None:
        """Add the gradient of ``loss`` (scalar, mean over the micro-batch), divided by the accumulation.

        Args:
            loss: of this rank.
            discard: make ``step`` skip the step as if its gradient were not finite, whatever earlier micro-batches
                gave; equal on all ranks.
        """

    def averaged_ranks(self, world: World) -> int:
        """Return by what the gradients inside a backward pass exceed those of the mean over the global batch.

        That is 1, or the number of ranks, if their gradients are averaged after it.
        """
        return 1

    def named_calls(self) -> dict[str, list[tuple[object, str]]]:
        """Return the calls in a backward pass (object, method) by the name of their range in a profile."""
        return {}

    def attach(self, averages: Ema) -> None:  # noqa: B027
        """Take over the averages, if this engine moves them in its own pass over the weights."""

    @abstractmethod
    def check_grads(self) -> Tensor | None:
        """End the gradient of the step; return whether it is not finite, if nobody has to wait for the answer.

        Returns:
            Scalar on the device, not zero if ``optimizer_step`` is going to change nothing; equal on all ranks. None:
            the host learns it there.
        """

    def discard(self) -> None:  # noqa: B027
        """Void the gradient: ``optimizer_step`` is going to change nothing."""

    @abstractmethod
    def optimizer_step(self) -> None:
        """Take the optimizer step; change nothing if a gradient is not finite on any rank.

        DivergedError: under fp16, when the loss scale is at its minimum and the gradient still overflows.
        """

    @abstractmethod
    def finish_step(self, *, skipped: bool) -> bool:
        """Learn what ``check_grads`` returned, set the next learning rate; return False if the step changed nothing."""

    def step(self) -> bool:
        """Take the optimizer step and wait for it; return False if it changed nothing, see ``optimizer_step``."""
        flag = self.check_grads()
        self.optimizer_step()
        return self.finish_step(skipped=flag is not None and bool(flag))

    @abstractmethod
    def grad_norm(self) -> Tensor | float | None:
        """Return the norm of the last gradient before clipping, left on its device; None before the first step."""

    @property
    @abstractmethod
    def loss_scale(self) -> dict[str, float]:
        """State of the dynamic fp16 loss scale; empty in other precisions."""

    @abstractmethod
    def restore(self, applied: int, loss_scale: dict[str, float]) -> None:
        """Restore the learning rate and, under fp16, the loss scale after ``applied`` steps."""

    @abstractmethod
    def return_to(self, read: Callable[[Fragment], Tensor]) -> None:
        """Load the weights of a checkpoint between two steps, as if the engine were built with them.

        The optimizer state is reset in place to that before the first step; ``checkpoints.restore`` sets the masters,
        as after a start. ``read`` returns a fragment, ``[numel]`` fp32 on the CPU.
        """

    @abstractmethod
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set the weights of a network on ``meta``: parameters and buffers by name, whole, fp32 on the CPU."""
