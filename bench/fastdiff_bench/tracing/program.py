"""Traced steps of the real loop, in the process of the trainer."""

from collections.abc import Callable
from pathlib import Path

import torch

from fastdiff.training.profiling.ranges import named_ranges
from fastdiff.training.profiling.recording import Recording
from fastdiff.training.state import TrainState
from fastdiff_bench import BenchError


def trace(state: TrainState, step: Callable[[], object], folder: Path, steps: int) -> Path:
    """Trace some steps.

    Args:
        state: of the run, with warm caches.
        step: takes a whole step of it.
        folder: for the trace.
        steps: number of traced steps, after one more that only the profiler warms up with.

    Returns:
        The trace.

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
    return path
