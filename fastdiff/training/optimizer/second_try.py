"""Out of memory in the optimizer step: the rank frees what the allocator holds, and takes that part of the step again.

The gradient is whole by then, and other ranks may have updated their weights: the step cannot be taken back. The
activations are gone, so a smaller micro-batch would not help; the room is lost to memory that the allocator keeps for
sizes that nobody asks for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch

from fastdiff.console import log
from fastdiff.models.cost.memory import exhausted

T = TypeVar("T")


def with_a_second_try(action: Callable[[], T]) -> T:
    """Run a part of an update, and once more if it runs out of memory.

    Args:
        action: allocates what it needs before it changes anything.
    """
    try:
        return action()
    except Exception as error:
        if exhausted(error) is None:
            raise
        cause = str(error).strip().split("\n")[0]
    # Outside of the handler, whose traceback holds what the first try has allocated.
    log.warning(f"out of memory in the optimizer step: this rank frees its cache and goes on ({cause})")
    free_memory()
    return action()


def give_a_second_try(optimizer: torch.optim.Optimizer) -> None:
    """Let ``step`` of an optimizer have a second try; a gradient that the first one has clipped stays as it is."""

    def step(self: torch.optim.Optimizer, closure: None = None) -> Any:
        return with_a_second_try(partial(_step_anew, self, closure))

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _step_anew(optimizer: torch.optim.Optimizer, closure: None) -> Any:
    """Take a step; a state that a try before has begun is created again."""
    most = max(map(len, optimizer.state.values()), default=0)
    for key in [key for key, state in optimizer.state.items() if "step" in state and len(state) < min(most, 3)]:
        del optimizer.state[key]
    return type(optimizer).step(optimizer, closure)  # type: ignore[func-returns-value]


def free_memory() -> None:
    """Free what nobody uses any more: cycles of Python, and memory that the allocator of the GPU keeps."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU in use
