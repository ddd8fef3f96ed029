"""Interface of callbacks, their sequence, and the callback that ends a preempted run."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import ClassVar

from fastdiff.errors import Preempted
from fastdiff.ledger.records import Account
from fastdiff.training.state import TrainState


class Callback:
    """Hook that is called after every optimizer step, and once at the end of a successful run."""

    account: ClassVar[Account | None] = None
    """Account of the ledger to which its time belongs; None: that of the step, or of the stop."""

    def on_step(self, state: TrainState) -> None:
        """Act after a step if due; read from the device only then."""

    def on_end(self, state: TrainState) -> None:
        """Act at the end."""

    def on_preempted(self, state: TrainState) -> None:
        """Act when the run is asked to stop."""

    def rehearse(self, state: TrainState) -> None:
        """Do once what needs the memory of the device, before the first step, and keep nothing of it."""

    def on_start(self, state: TrainState) -> None:
        """Act before the first step, after the rehearsal, and before the step after a rewind."""

    def on_rewind(self, state: TrainState) -> None:
        """Act before the run goes back behind a spike; ``close`` follows, and new callbacks."""

    def close(self) -> None:
        """Release files; called on every way out."""


class Callbacks:
    """All callbacks of a run, in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def on_step(self, state: TrainState) -> None:
        """Call every callback; the step times exclude it."""
        state.ledger.step_taken(state.progress.steps)
        with state.meters.off_the_clock():
            self._call(state, lambda callback: callback.on_step(state))
        state.ledger.write_when_due()

    def on_end(self, state: TrainState) -> None:
        """Call every callback's ``on_end``."""
        self._call(state, lambda callback: callback.on_end(state))

    def on_preempted(self, state: TrainState) -> None:
        """Call every callback's ``on_preempted``."""
        self._call(state, lambda callback: callback.on_preempted(state))

    def rehearse(self, state: TrainState) -> None:
        """Call every callback's ``rehearse``."""
        for callback in self._callbacks:
            callback.rehearse(state)

    def on_start(self, state: TrainState) -> None:
        """Call every callback's ``on_start``."""
        for callback in self._callbacks:
            callback.on_start(state)

    def on_rewind(self, state: TrainState) -> None:
        """Call every callback's ``on_rewind``."""
        for callback in self._callbacks:
            callback.on_rewind(state)

    def _call(self, state: TrainState, call: Callable[[Callback], None]) -> None:
        """Call every callback on its account."""
        for callback in self._callbacks:
            with nullcontext() if callback.account is None else state.ledger.account(callback.account):
                call(callback)


class Preempt(Callback):
    """End of the run on all ranks when any rank was asked to stop (``parallel.preemption``)."""

    def on_step(self, state: TrainState) -> None:
        """Raise Preempted on every rank, after the same step, if any was asked to stop."""
        if state.guard.flags.stop:
            reasons = state.world.gather(state.guard.consensus.stop_reason)
            raise preempted(next(reason for reason in reasons if reason is not None), state)


def preempted(reason: str, state: TrainState) -> Preempted:
    """Return the error of a run that was asked to stop, and saves its steps so far."""
    if state.progress.steps == 0:
        return Preempted(f"{reason} in the first step, nothing saved; the same command starts the run again")
    return Preempted(f"{reason}: saved step {state.progress.steps}; the same command resumes from there")
