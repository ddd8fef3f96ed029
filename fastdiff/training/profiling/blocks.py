"""Ranges of the blocks of a network, in both passes, by hooks that only a profile has.

A block's forward range is opened and closed by hooks of its module, which run outside of its compiled forward. Its
backward range begins when the gradient of its output is complete, and ends when that of its input is, or that of the
output of another block: hooks of these tensors, which leave the graph of autograd as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastdiff.models.blockwise import BlockwiseModel


class _Range(Protocol):
    def close(self) -> None: ...


class _Block:
    """The ranges of one block."""

    def __init__(self, number: int, path: str, opened: Callable[[str], _Range], passes: _Backward) -> None:
        self._name = (f"block {number}", f" ({path})")
        self._opened, self._passes = opened, passes
        self._ranges: list[_Range] = []
        """Open, the outermost first."""

    def watch(self, module: nn.Module, stack: ExitStack) -> None:
        """Register the hooks: DeepSpeed's own lie between the first and the last ones, as a range of their own."""
        has_others = bool(module._forward_pre_hooks), bool(module._forward_hooks)
        for handle in (
            module.register_forward_pre_hook(lambda _, given: self._begin(given, hooks=has_others[0]), prepend=True),
            module.register_forward_pre_hook(lambda *_: self._end_hooks(has_others[0])),
            module.register_forward_hook(lambda *_: self._begin_hooks(has_others[1]), prepend=True),
            # Recomputation ends a forward by an exception, as soon as it has what the backward pass needs.
            module.register_forward_hook(lambda _, __, result: self._end(result), always_call=True),
        ):
            stack.callback(handle.remove)

    def _begin(self, given: tuple[Any, ...], *, hooks: bool) -> None:
        recomputes = torch._C._current_graph_task_id() != -1  # inside a backward pass
        self._open("recompute" if recomputes else "forward")
        if not recomputes:
            for tensor in _differentiable(given):
                _on_gradient(tensor, lambda _: self._passes.leave(self))
        self._begin_hooks(hooks)

    def _begin_hooks(self, wanted: bool) -> None:
        if wanted:
            self._ranges.append(self._opened("hooks"))

    def _end_hooks(self, wanted: bool) -> None:
        if wanted:
            self._ranges.pop().close()

    def _open(self, phase: str) -> None:
        self._ranges.append(self._opened(f"{self._name[0]} {phase}{self._name[1]}"))

    def _end(self, result: Any) -> None:
        while self._ranges:
            self._ranges.pop().close()
        if torch._C._current_graph_task_id() == -1:
            for tensor in _differentiable(result if isinstance(result, tuple) else (result,)):
                _on_gradient(tensor, lambda _: self._passes.enter(self))

    def backward(self) -> _Range:
        """Open the range of the backward pass."""
        return self._opened(f"{self._name[0]} backward{self._name[1]}")


class _Backward:
    """The block whose backward pass runs."""

    def __init__(self) -> None:
        self._current: tuple[_Block, _Range] | None = None

    def enter(self, block: _Block) -> None:
        """Begin with a block, unless its pass runs: it may have several outputs."""
        if self._current is None or self._current[0] is not block:
            self.leave()
            self._current = block, block.backward()

    def leave(self, block: _Block | None = None) -> None:
        """End the pass of a block if it runs; None: of any."""
        if self._current is not None and block in (None, self._current[0]):
            self._current[1].close()
            self._current = None


def watch_blocks(network: BlockwiseModel, opened: Callable[[str], _Range], stack: ExitStack) -> Callable[[], None]:
    """Open a range per pass of each block, until the stack is closed; return what to call after each backward pass."""
    passes = _Backward()
    blocks = (item for item in network.named_modules() if isinstance(item[1], network.block_classes))
    for number, (path, module) in enumerate(blocks):
        _Block(number, path, opened, passes).watch(module, stack)
    return passes.leave


def _differentiable(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the tensors through which a gradient flows."""
    return (value for value in values if isinstance(value, Tensor) and value.requires_grad)


def _on_gradient(tensor: Tensor, act: Callable[[Tensor], None]) -> None:
    tensor.register_hook(act)  # type: ignore[no-untyped-call]
