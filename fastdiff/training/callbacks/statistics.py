"""Record of what a reference run and a run that is compared with it have in common: ``statistics.jsonl``."""

from fastdiff.evaluation.conformance.numbers import STATISTICS
from fastdiff.json_lines import Record
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.state import TrainState
from fastdiff.training.statistics.weights import sizes

_SAMPLES = 512
"""Samples whose statistics a record has, from as many steps before it as they take."""
_DIGITS = 6


class Statistics(Callback):
    """Statistics of latents, noise levels, conditions, targets, weights and averages after few steps.

    The steps are 1, 2, 5, 10, 20, 50, ... (``is_recorded``) and the last one. In between nothing is measured. Those of
    the samples are the same for any number of ranks, to the bit where the device computes the same numbers; those of
    the weights are as equal as the weights.
    """

    def __init__(self, state: TrainState) -> None:
        self._lines = state.json_lines(STATISTICS)

    def on_start(self, state: TrainState) -> None:
        """Begin where the run continues."""
        state.inputs.read(state.world)  # of steps that a rewind has undone
        self._look_ahead(state)

    def on_step(self, state: TrainState) -> None:
        """Record after a step of the series."""
        if is_recorded(state.progress.steps) or state.progress.samples >= state.config.samples:
            record = self._record(state)
            if state.world.is_first:
                self._lines.write(record)
        self._look_ahead(state)

    def _look_ahead(self, state: TrainState) -> None:
        step, most = state.progress.steps + 1, -(-_SAMPLES // state.config.batch.samples)
        last = state.config.steps
        state.inputs.wanted = any(is_recorded(n) or n == last for n in range(step, step + most))

    def _record(self, state: TrainState) -> Record:
        samples = state.inputs.read(state.world)
        of_weights = sizes(state.engine, state.ema, state.world)
        values = {
            name: [_rounded(value), None if error is None else _rounded(error)]
            for name, (value, error) in samples.items()
        }
        values |= {name: [_rounded(value), None] for name, value in of_weights.items()}
        return {"step": state.progress.steps, "samples": state.progress.samples, "values": values}


def is_recorded(step: int) -> bool:
    """Return whether a step is in the series 1, 2, 5, 10, 20, 50, ..."""
    return step > 0 and str(step).rstrip("0") in ("1", "2", "5")


def _rounded(value: float) -> float | None:
    """Return a value to so many digits, None for NaN and infinity, which JSON lacks."""
    return float(f"{value:.{_DIGITS}g}") if value - value == 0 else None
