"""fastdiff itself: the unmodified loop of ``fastdiff/train.py``, with a callback that measures time."""

import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fastdiff.batch import Batch
from fastdiff.config.launch_options import Launch
from fastdiff.console import quieten
from fastdiff.models.compile_clock import compiled
from fastdiff.parallel.world import start_world
from fastdiff.training.build import Run, build
from fastdiff.training.callbacks.base import Callback, Callbacks
from fastdiff.training.forward_backward.micro_batch import ForwardBackward
from fastdiff.training.loop import take_steps
from fastdiff.training.state import TrainState
from fastdiff_bench.measure.session import Enough, StepTimer
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.tracing import program
from fastdiff_bench.trainers.initial_weights import drawn_on


def run(
    timer: StepTimer,
    workload: Workload,
    data: Path,
    unmarked: int | None = None,
    traced: tuple[Path, int] | None = None,
) -> None:
    """Step until ``Enough``.

    Facts: ``parameters``, ``device`` (its name), ``micro`` (samples of a micro-batch), ``start_s`` (from the start
    of the process until all is built and compiled), ``compiled_anew`` and ``from_cache`` (parts of graphs that were
    compiled until then, or loaded), ``graph_breaks`` and ``compilations`` of torch.compile so far, ``last_compilation``
    and ``last_capture`` (the last step that compiled, or captured a CUDA graph, counted from 1; 0: none); with
    ``traced`` also ``trace``, the path of the trace.

    Args:
        timer: of this process.
        workload: what to train.
        data: folder of shards that fit its model.
        unmarked: sessions, the warm-up among them, after which the phases of a step are measured, too; None: never.
        traced: trace this number of additional steps at the end, into this folder.
    """
    with building(timer, workload, data) as (built, _):
        state = built.state
        state.scales.end_warm_up()
        timer.ready(
            parameters=parameters_of(state),
            device=torch.cuda.get_device_name() if timer.device.type == "cuda" else "cpu",
            micro=state.config.batch.per_rank(state.world.size),
            start_s=time.time() - psutil.Process().create_time(),
            compiled_anew=compiled.anew,
            from_cache=compiled.from_cache,
        )
        stream: Iterator[Batch] = built.batches
        if traced is not None:  # a graph shows no parts
            state.forward_backward = ForwardBackward(state.engine, state.objective, state.meters, state.guard)
        callbacks = Observed(built.callbacks, AfterStep(timer, unmarked))
        try:
            with suppress(_Marked):
                take_steps(state, stream, callbacks)
            stream = _marked(timer, state, stream)
            take_steps(state, stream, callbacks)
        except Enough:
            if traced is not None:
                timer.facts["trace"] = str(program.trace(state, lambda: _one_step(state, stream), *traced))
            raise


class _Marked(Exception):
    """The steps that follow have marks."""


def _marked(timer: StepTimer, state: TrainState, stream: Iterator[Batch]) -> Iterator[Batch]:
    """Mark the phases of all steps from here on; return the batches, marked too."""
    of_engine = {"backward": "backward", "check_grads": "optimizer", "optimizer_step": "optimizer"}
    state.engine = cast(Any, _Timed(timer, state.engine, **of_engine))
    state.objective = cast(Any, _Timed(timer, state.objective, add_noise="objective", loss="objective"))
    state.ema = cast(Any, _Timed(timer, state.ema, update="ema"))
    state.forward_backward = ForwardBackward(state.engine, state.objective, state.meters, state.guard)
    return _timed_batches(timer, stream)


@contextmanager
def building(timer: StepTimer, workload: Workload, data: Path, place: Path | None = None) -> Iterator[tuple[Run, Path]]:
    """Build a run and its folder, which is deleted afterwards; it lies in ``place``, None: in that of the timer."""
    quieten()
    world, ended = start_world(), None
    with ExitStack() as stack:
        folder = world.on_rank0(lambda: Path(tempfile.mkdtemp(prefix="run-", dir=place or timer.folder)))
        if world.is_first:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        launch = Launch(deepspeed=workload.deepspeed_json(), resume="never")
        with drawn_on(world.device):
            run = build(workload.config(data, folder), launch, world, stack)
        try:
            yield run, folder
        except Enough as enough:  # no failure: compiled code stays trusted
            ended = enough
    if ended is not None:
        raise ended


def parameters_of(state: TrainState) -> int:
    """Return the number of trained parameters."""
    return sum(math.prod(shape) for shape in state.engine.shapes.values())


class AfterStep(Callback):
    """Reports every step, and the activity of torch.compile so far, to the step timer."""

    def __init__(self, timer: StepTimer, unmarked: int | None = None) -> None:
        self._timer, self._steps, self._unmarked = timer, 0, unmarked
        self._captures = 0
        timer.facts |= dict.fromkeys(("compilations", "last_compilation", "graph_breaks", "last_capture"), 0)

    def on_step(self, state: TrainState) -> None:
        """Record the facts, then end the step."""
        facts, self._steps = self._timer.facts, self._steps + 1
        compilations = counters["stats"]["unique_graphs"]
        if compilations != facts["compilations"]:
            facts["compilations"], facts["last_compilation"] = compilations, self._steps
        if state.forward_backward.captures != self._captures:
            self._captures, facts["last_capture"] = state.forward_backward.captures, self._steps
        facts["graph_breaks"] = counters["graph_break"].total()
        self._timer.after_step()
        if self._unmarked is not None and self._timer.sessions > self._unmarked:
            self._unmarked = None
            raise _Marked


class Observed(Callbacks):
    """The callbacks of a run, followed by one more."""

    def __init__(self, own: Callbacks, last: Callback) -> None:
        super().__init__([last])
        self._own = own

    def on_step(self, state: TrainState) -> None:
        """Call all of them."""
        self._own.on_step(state)
        state.inputs.wanted = False  # the few steps that measure their inputs are not the usual ones
        super().on_step(state)


class _Stop(Callback):
    def on_step(self, state: TrainState) -> None:
        raise Enough


def _one_step(state: TrainState, batches: Iterator[Batch]) -> None:
    with suppress(Enough):
        take_steps(state, batches, Callbacks([_Stop()]))


def _timed_batches(timer: StepTimer, batches: Iterator[Batch]) -> Iterator[Batch]:
    while True:
        with timer.phase("data"):
            batch = next(batches)
        yield batch


class _Timed:
    """Wrapper of a part of the run that measures calls of some methods, by phase; all else is that of the part."""

    def __init__(self, timer: StepTimer, part: Any, **phases: str) -> None:
        self._timer, self._part = timer, part
        for method, phase in phases.items():
            setattr(self, method, timer.phase(phase)(getattr(part, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *inputs: Tensor, **condition: Tensor) -> Tensor:
        with self._timer.phase("forward"):
            return cast(Tensor, self._part(*inputs, **condition))
