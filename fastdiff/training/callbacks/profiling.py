"""Profile of some steps: a trace and a snapshot of the memory per rank, in the folder ``profile`` of the run."""

from contextlib import ExitStack
from pathlib import Path

from fastdiff.console import log
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.profiling.ranges import Opener, Range, named_ranges
from fastdiff.training.profiling.recording import MEMORY_VIEWER, VIEWER, Recording, trace_path
from fastdiff.training.state import TrainState

FOLDER = "profile"


class Profile(Callback):
    """A profile of the steps after FIRST up to LAST of ``--performance.profile``, on every rank; the last callback.

    It changes no number of the run, and whatever goes wrong with it is a warning. A rewind ends it early, and another
    one begins after it; an error or a request to stop discards it, as there may be no time to write it.

    Args:
        state: before the first step; at or behind the first step of the profile, it begins now.
    """

    def __init__(self, state: TrainState) -> None:
        self._steps = state.config.performance.profiled
        self._folder = state.folder / FOLDER
        self._recording: Recording | None = None
        self._ranges = ExitStack()
        self._opened: Opener | None = None
        self._step: Range | None = None
        self._first = 1
        """The first step in the trace, from 1."""
        if state.world.is_first and state.progress.steps >= self._steps.stop and not self._has_traces(state):
            log.info(f"no profile: the run is at step {state.progress.steps}, behind the last step of the profile")

    def on_start(self, state: TrainState) -> None:
        """Begin if the first step is to be profiled."""
        self._begin_if_due(state)

    def on_step(self, state: TrainState) -> None:
        """Begin or end the profile."""
        if self._recording is None:
            self._begin_if_due(state)
        elif state.progress.steps < self._steps.stop:
            self._next_step(state)
        else:
            self._end(state)

    def on_end(self, state: TrainState) -> None:
        """End the profile if it runs, with the steps so far."""
        if self._recording is not None:
            self._end(state)

    def on_rewind(self, state: TrainState) -> None:
        """End the profile if it runs, with the steps up to the spike."""
        self.on_end(state)

    def close(self) -> None:
        """Discard the profile if it runs, without waiting for the device, which may wait for a rank that is gone."""
        if self._recording is not None:
            self._ranges.close()
            self._recording.discard(wait=False)
            self._recording = None

    def _has_traces(self, state: TrainState) -> bool:
        """Return whether a profile of these steps has been written."""
        return any(trace_path(self._folder, state.world.rank, done + 1).exists() for done in self._steps)

    def _begin_if_due(self, state: TrainState) -> None:
        if state.progress.steps not in self._steps:
            return
        try:
            self._recording, self._first = Recording(state.world.device), state.progress.steps + 1
            self._opened = self._ranges.enter_context(named_ranges(state))
            self._next_step(state)
        except Exception as error:
            self._fail(error)

    def _next_step(self, state: TrainState) -> None:
        assert self._opened is not None
        if self._step is not None:
            self._step.close()
        self._step = self._opened(f"step {state.progress.steps + 1}")

    def _end(self, state: TrainState) -> None:
        assert self._recording is not None
        try:
            self._ranges.close()
            self._recording.stop()
            state.heartbeat.again()
            written = self._recording.write(self._folder, state.world.rank, self._first, state.heartbeat.again)
            self._recording, self._steps = None, range(0)
            if state.world.is_first:
                log.info(_told(state, written))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Warn, and take no profile; the run goes on."""
        recording, self._recording, self._steps = self._recording, None, range(0)
        self._ranges.close()
        if recording is not None:
            recording.discard()
        log.warning(
            f"no profile of this rank in {self._folder}: {' '.join(str(error).split()) or type(error).__name__}"
        )


def _told(state: TrainState, written: list[Path]) -> str:
    trace, *memory = written
    others = f" (and one file for each of the other {state.world.size - 1} ranks)" if state.world.size > 1 else ""
    where = f"memory: {memory[0]}, open it at {MEMORY_VIEWER}" if memory else "no snapshot of the memory on a CPU"
    return f"profile: {trace}{others}, open it at {VIEWER}; {where}"
