"""Named ranges of a step for torch's profiler and, on a GPU, for NVTX.

The ranges are put around the parts of a run while a profile is taken, and removed afterwards: a step without a profile
runs the code of the parts alone. No range waits for the device.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch.autograd.profiler import record_function

from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.training.profiling.blocks import watch_blocks
from fastdiff.training.state import TrainState


class Range:
    """An open range, which appears in a trace with its name and duration.

    It may be closed by another thread than the one that opened it, and more than once: only the first time counts.

    Args:
        name: in the trace.
        nvtx: also open it for NVIDIA's tools.
    """

    def __init__(self, name: str, *, nvtx: bool) -> None:
        self._recorded: record_function | None = record_function(name)
        self._recorded.__enter__()  # type: ignore[no-untyped-call]
        self._nvtx = torch.cuda.nvtx.range_start(name) if nvtx else None  # type: ignore[no-untyped-call]

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._recorded is None

    def close(self) -> None:
        """End the range."""
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            recorded.__exit__(None, None, None)
            if self._nvtx is not None:
                torch.cuda.nvtx.range_end(self._nvtx)  # type: ignore[no-untyped-call]


Opener = Callable[[str], Range]
_Call = Callable[..., Any]


@contextmanager
def named_ranges(state: TrainState) -> Iterator[Opener]:
    """Put named ranges around the parts of every step inside; called by any rank alone.

    The ranges are ``data``, ``forward``, ``objective``, ``block N forward`` (or ``recompute``), ``backward``, ``block N
    backward``, ``hooks`` (DeepSpeed's own work around blocks and gradients), ``reduce``, ``consensus``, ``optimizer``,
    ``averages`` and ``callbacks``. Hooks and calls are outside of compiled code.

    The flat engine has no ``hooks``. Its ``reduce`` only starts the reduction of a bucket, whose end has no range, and
    its ``averages`` is empty, because ``optimizer`` moves them.

    Args:
        state: of the run.

    Yields:
        A function that opens another range; all that are open at the end are closed.
    """
    open_: list[Range] = []
    nvtx = state.world.device.type == "cuda"

    def opened(name: str) -> Range:
        open_[:] = [range_ for range_ in open_ if not range_.closed]
        open_.append(Range(name, nvtx=nvtx))
        return open_[-1]

    def close_all() -> None:
        for range_ in reversed(open_):
            range_.close()

    with ExitStack() as stack:
        stack.callback(close_all)
        backward = watch_blocks(cast(BlockwiseModel, state.engine.module), opened, stack)
        _name_calls(state, opened, stack, backward)
        yield opened


def _name_calls(state: TrainState, opened: Opener, stack: ExitStack, end_of_blocks: Callable[[], None]) -> None:
    calls: dict[str, list[tuple[object, str]]] = {
        "objective": [(state.objective, "add_noise"), (state.objective, "loss")],
        "consensus": [(state.guard.consensus, "start"), (state.guard.consensus, "wait")],
        "optimizer": [(state.engine, "check_grads"), (state.engine, "optimizer_step")],
        "averages": [(state.ema, "update")],
    }
    for part in (calls, state.engine.named_calls()):
        for name, owned in part.items():
            for owner, method in owned:
                _replace(owner, method, functools.partial(_in_range, opened, name), stack)
    _replace(state.engine, "backward", functools.partial(_in_range, opened, "backward", last=end_of_blocks), stack)
    _replace(state.meters, "phase", functools.partial(_context_in_range, opened), stack)
    named = functools.partial(_context_in_range, opened, name="callbacks")
    _replace(state.meters, "off_the_clock", named, stack)


def _replace(owner: Any, method: str, wrap: Callable[[_Call], _Call], stack: ExitStack) -> None:
    """Put a wrapper in front of a method of one object, and take it away with the stack."""
    before = vars(owner).get(method)
    wrapped = wrap(getattr(owner, method))
    vars(owner)[method] = wrapped

    def undo() -> None:
        if before is None:
            del vars(owner)[method]
        else:
            vars(owner)[method] = before

    stack.callback(undo)


def _in_range(
    opened: Opener, name: str, call: Callable[..., Any], last: Callable[[], None] | None = None
) -> Callable[..., Any]:
    @functools.wraps(call)
    def ranged(*given: Any, **more: Any) -> Any:
        around = opened(name)
        try:
            return call(*given, **more)
        finally:
            if last is not None:
                last()
            around.close()

    return ranged


def _context_in_range(
    opened: Opener, context: Callable[..., AbstractContextManager[Any]], name: str = ""
) -> Callable[..., AbstractContextManager[Any]]:
    """Wrap a method that returns a context; the range has its first argument as its name, unless there is a name."""

    @contextmanager
    def ranged(*given: Any) -> Iterator[Any]:
        around = opened(name or given[0])
        try:
            with context(*given) as value:
                yield value
        finally:
            around.close()

    return ranged
