"""Out of memory in the update of fp32 moments: the rank frees what the allocator holds, and takes it again.

The gradient is whole by then, and other ranks may have updated their weights: the step cannot be taken back. The
activations are gone, so a smaller micro-batch would not help; the room is lost to memory that the allocator keeps for
sizes that nobody asks for.

Only an update that allocates everything before it changes anything can be taken again: torch's fused AdamW under
DeepSpeed, and that of ``engines.update`` with its kernel or on a CPU. Any other, such as the 8-bit optimizers, which
update tensor after tensor, ends the run with ``memory.explanation``.
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

_ENTRIES = 3
"""Of the state of a tensor, which AdamW creates one after another: ``step``, ``exp_avg`` and ``exp_avg_sq``."""


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
    """Let ``step`` of torch's AdamW, fused and with one group, have a second try; leave any other optimizer alone."""
    if type(optimizer) is not torch.optim.AdamW:  # a class derived from it may change gradients before it allocates
        return

    def step(self: torch.optim.Optimizer, closure: None = None) -> Any:
        return with_a_second_try(partial(_step_anew, self, closure))

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _step_anew(optimizer: torch.optim.Optimizer, closure: None) -> Any:
    """Take a step; a state that the first try has left incomplete is created again."""
    for key in [key for key, state in optimizer.state.items() if len(state) < _ENTRIES]:
        del optimizer.state[key]
    return type(optimizer).step(optimizer, closure)  # type: ignore[func-returns-value]


def free_memory() -> None:
    """Free what nobody uses any more: cycles of Python, and memory that the allocator of the GPU keeps."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU in use
