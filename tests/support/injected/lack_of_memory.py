"""Real runs in which torch's OutOfMemoryError is raised at given places: by hooks of modules, gradients and optimizers.

The product knows nothing of it: the hooks are put into a run that ``fastdiff.training.build`` has built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn

import fastdiff.train
from fastdiff.diffusion.levels import Corruption
from fastdiff.parallel.world import World
from fastdiff.training.build import Run, build

Where = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class Lack:
    """A place at which a rank runs out of memory, once."""

    where: Where
    rank: int = 0
    step: int = 1
    """Steps taken before."""
    micro: int = 0
    """Micro-batches of the step before."""
    module: str = ""
    """Name of the module whose forward pass, or the gradient of whose output, fails; not for the step. Of the forward
    pass also ``objective``, which precedes all modules."""


def fail() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


@contextmanager
def lacking(world: World, *lacks: Lack) -> Iterator[list[Lack]]:
    """Inside, ``train`` runs out of memory at these places; yields those that have occurred on this rank."""
    occurred: list[Lack] = []

    def plant(*arguments: Any) -> Run:
        run = build(*arguments)
        for lack in lacks:
            if lack.rank == world.rank:
                _plant(run, lack, occurred)
        return run

    with mock.patch.object(fastdiff.train, "build", plant):
        yield occurred


def _plant(run: Run, lack: Lack, occurred: list[Lack]) -> None:
    state = run.state

    def fail_if_due() -> None:
        micro = state.guard.observed - (lack.where == "backward")
        at = (state.progress.steps, lack.micro if lack.where == "step" else micro)
        if lack not in occurred and at == (lack.step, lack.micro):
            occurred.append(lack)
            fail()

    def at_output(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        first: Tensor = output[0] if isinstance(output, tuple) else output
        if lack.where == "forward":
            fail_if_due()
        elif first.requires_grad:
            first.register_hook(lambda _: fail_if_due())

    if (lack.where, lack.module) == ("forward", "objective"):
        corrupt = state.objective.corrupt

        def fail_or_corrupt(*arguments: Any) -> Corruption:
            fail_if_due()
            return corrupt(*arguments)

        state.objective.corrupt = fail_or_corrupt  # type: ignore[method-assign]
    elif lack.where != "step":
        state.engine.module.get_submodule(lack.module).register_forward_hook(at_output)
    elif state.engine.kind == "deepspeed":
        state.engine.optimizer.register_step_pre_hook(lambda *_: fail_if_due())
    else:
        update: Any = state.engine._update  # type: ignore[attr-defined]
        name = "_take_on_cpu" if hasattr(update, "_take_on_cpu") else "_take"
        own = getattr(update, name)

        def take(*arguments: Any) -> None:
            fail_if_due()
            own(*arguments)

        setattr(update, name, take)
