"""Traced steps of the real loop, in the process of the trainer."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from fastdiff.models.cost.memory import exhausted
from fastdiff.training.profiling.ranges import named_ranges
from fastdiff.training.profiling.recording import Recording
from fastdiff.training.state import TrainState
from fastdiff_bench import BenchError
from fastdiff_bench.measure.session import Fact
from fastdiff_bench.tracing import budget


def trace(state: TrainState, step: Callable[[], object], folder: Path, steps: int) -> dict[str, Fact]:
    """Trace some steps, then count the work of another one.

    Args:
        state: of the run, with warm caches.
        step: takes a whole step of it.
        folder: for the trace.
        steps: number of traced steps, after one more that only the profiler warms up with.

    Returns:
        Facts: ``trace``, the path of the trace, and ``work``, that of ``budget.count`` as JSON, empty if the memory
        does not suffice for that step.

    Raises:
        BenchError: the trace could not be written.
    """
    device = state.world.device
    with Recording(device, detailed=False) as recording, named_ranges(state) as opened:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        for number in range(1, 1 + steps):
            around = opened(f"step {number}")
            step()
            around.close()
        recording.stop()
        try:
            (path,) = recording.write(folder, state.world.rank, 1, state.heartbeat.again)
        except OSError as error:
            raise BenchError(f"{folder}: no trace ({error})") from error
    return {"trace": str(path), "work": json.dumps(_work(state, step))}


def _work(state: TrainState, step: Callable[[], object]) -> budget.Work:
    """Return the work of a step; nothing if it is out of memory: blocks that are not compiled need more."""
    try:
        return budget.count(state, step)
    except Exception as error:
        if exhausted(error) is None:
            raise
        return {}
