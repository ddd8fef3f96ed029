"""Collectives of a fastdiff step, recorded in warm-up steps.

Every collective called from Python goes through a method of ``torch.distributed.ProcessGroup``, whether the caller is
DeepSpeed, ``torch.distributed`` or fastdiff. While recorded, these methods first wait for all ranks and finally for the
result, so the seconds are those of the transfer alone.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastdiff.parallel.world import free_port
from fastdiff_bench.measure.session import Fact, StepTimer
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.trainers import ours

Call = tuple[str, int, float]
"""Kind, bytes and seconds. The bytes are those of the whole vector, which every rank has at the end or at the start;
for a gather or a scatter those of one rank's part, because only the root has the whole.
"""

_KINDS = {
    "allreduce": "all-reduce",
    "allreduce_coalesced": "all-reduce",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "all_gather_single_coalesced": "all-gather",
    "allgather": "all-gather",
    "allgather_coalesced": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_single_coalesced": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "barrier": "barrier",
}
"""Methods of a process group and the kind of their collective."""
_SECOND = {
    method for method, kind in _KINDS.items() if kind in ("all-gather", "reduce-scatter", "all-to-all", "gather")
}
"""Methods whose second argument counts, the inputs. For the rest the first argument counts: the inputs, or the output
of a scatter.
"""


def run(timer: StepTimer, workload: Workload, data: Path, counted: tuple[int, int]) -> None:
    """Step until ``Enough``; the collectives of each recorded step become the fact ``calls``, a JSON list.

    Args:
        timer: of this process.
        workload: what to train.
        data: folder of shards that fit its model.
        counted: first and end (exclusive) of the recorded steps, counted from 0.
    """
    with ExitStack() as stack:
        ours.run(cast(StepTimer, _CountingTimer(timer, stack, *counted)), workload, data)


def run_apart(timer: StepTimer, workload: Workload, data: Path) -> None:
    """Step until ``Enough``, each process as the only rank of its own run, at the same time as the other processes.

    They share the machine but do not communicate.
    """
    if timer.device.type == "cuda":  # nothing has started CUDA in this process yet
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_PORT=str(free_port()))
    ours.run(timer, workload, data)


class _CountingTimer:
    """Step timer that records collectives from one step to another."""

    def __init__(self, timer: StepTimer, stack: ExitStack, first: int, end: int) -> None:
        self._timer, self._stack, self._first, self._end = timer, stack, first, end
        self._done = 0
        self._calls: list[Call] = []
        self._steps: list[list[Call]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)

    def ready(self, **facts: Fact) -> None:
        self._timer.ready(**facts)
        self._between_steps()

    def after_step(self) -> None:
        self._done += 1
        if self._first < self._done <= self._end:
            self._steps.append(self._calls.copy())
        self._calls.clear()
        self._between_steps()
        self._timer.after_step()

    def _between_steps(self) -> None:
        if self._done == self._first:
            self._stack.enter_context(recording(self._calls))
        elif self._done == self._end:
            self._stack.close()
            self._timer.facts["calls"] = json.dumps(self._steps)


@contextmanager
def recording(calls: list[Call]) -> Iterator[None]:
    """Append every collective of this process to ``calls``."""
    barrier = ProcessGroup.barrier

    def recorded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, *arguments: Any, **options: Any) -> Any:
            barrier(group).wait()
            begin = time.perf_counter()
            work = original(group, *arguments, **options)
            work.wait()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            calls.append((_KINDS[name], _vector(name, group.size(), arguments), time.perf_counter() - begin))
            return work

        return call

    replaced: dict[str, Any] = {
        name: recorded(name, getattr(ProcessGroup, name)) for name in vars(ProcessGroup) if name in _KINDS
    }
    with patch.multiple(ProcessGroup, **replaced):
        yield


def _vector(name: str, ranks: int, arguments: tuple[Any, ...]) -> int:
    counted = _bytes(arguments[1 if name in _SECOND else 0]) if arguments else 0
    return counted * ranks if _KINDS[name] == "all-gather" else counted


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors)) if isinstance(tensors, list | tuple) else 0
