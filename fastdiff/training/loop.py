"""The training loop: ``take_steps`` names everything that a step does, in order."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from fastdiff.batch import Batch
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.errors import Preempted
from fastdiff.parallel.preemption import StopRequest
from fastdiff.parallel.world import World
from fastdiff.progress import Progress
from fastdiff.starting import starting
from fastdiff.training import failure
from fastdiff.training.build import Run, build
from fastdiff.training.callbacks.base import Callbacks
from fastdiff.training.callbacks.divergence import RewindRequest
from fastdiff.training.memory.explanation import explaining_memory
from fastdiff.training.state import TrainState


def take_steps(state: TrainState, batches: Iterator[Batch], callbacks: Callbacks) -> None:
    """Take optimizer steps until the run has seen its samples; ``batches`` are this rank's micro-batches."""
    config, meters, guard = state.config, state.meters, state.guard

    while state.progress.samples < config.samples:
        meters.start_step(state.progress.steps)
        state.begin_step()
        for _ in range(config.batch.accumulation(state.world.size)):
            with meters.phase("data"):
                batch = next(batches)
            state.forward_backward(batch)
            state.inputs.observe(batch)
        state.applied = guard.take_step(state.engine)
        state.objective.timesteps.end_step(state.world)
        state.scales.end_step(state.world.max_, applied=state.applied)
        state.progress = state.progress.after(config.batch.samples, applied=state.applied, discarded=guard.discarded)
        if state.applied:
            state.ema.update(state.progress.applied)
        callbacks.on_step(state)


def train(
    config: RunConfig,
    launch: Launch,
    world: World,
    stop: StopRequest | None = None,
    built: Callable[[], object] | None = None,
) -> Progress:
    """Run, or continue, the run in ``config.output.folder`` to its end.

    Args:
        config: of the run.
        launch: the DeepSpeed JSON, and how to treat an existing run.
        world: the ranks; all of them call this.
        stop: requests to save and end that reach this rank.
        built: called once the run is built and rehearsed.

    Raises:
        FastdiffError: with the exit code of its cause.
    """
    stop = stop or StopRequest()
    with ExitStack() as stack, failure.noted():
        run = build(config, launch, world, stack, stop)
        starting.end()
        if built is not None:
            built()
        world.raise_on_all(None)  # from here on every rank has a state to save
        stop.arm(run.state.heartbeat)
        run.state.meters.restart_clock()
        try:
            with explaining_memory(run.state):
                with run.state.ledger.steps():
                    _take_all_steps(run)
                run.state.heartbeat.beat(run.state.progress.steps, "end")
                run.callbacks.on_end(run.state)
        except Preempted:
            try:
                run.callbacks.on_preempted(run.state)
            finally:
                stop.answered = True
            raise
        return run.state.progress


def _take_all_steps(run: Run) -> None:
    """Take the steps of a run to its end, and rewind after a spike where that is due."""
    while True:
        try:
            return take_steps(run.state, run.batches, run.callbacks)
        except RewindRequest as request:
            rewind = request.rewind
        with run.state.ledger.account("rewind"):
            run.go_back(rewind)
