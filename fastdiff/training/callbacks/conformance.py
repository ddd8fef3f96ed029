"""Comparison of a run of a preset with the reference that the preset ships, while it trains and at its end."""

from fastdiff.checkpoint.unchanged import config_changes
from fastdiff.config.run_record import as_json
from fastdiff.console import log
from fastdiff.evaluation.conformance.comparison import Conformance, compare
from fastdiff.evaluation.conformance.numbers import read_numbers
from fastdiff.evaluation.conformance.reference import Reference, shipped, shipped_names
from fastdiff.evaluation.conformance.report import in_log
from fastdiff.progress import Every
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.callbacks.statistics import is_recorded
from fastdiff.training.state import TrainState

MAY_DIFFER = ("seed",)
"""Fields that may differ from the preset's beside those that change no result (``checkpoint.unchanged.FREE``)."""
_SHOWN = 4
"""Fields in a message."""


class OwnReference(Callback):
    """Comparison with the reference of the preset, on rank 0, when statistics were recorded or a validation is due.

    A run has one if its configuration is that of a preset with a reference, apart from ``MAY_DIFFER``.
    """

    def __init__(self, state: TrainState, preset: str | None) -> None:
        validation = state.config.validation
        self._every = Every(validation.every, validation.first)
        self._reference = _reference_of(state, preset) if state.world.is_first else None
        self._told: frozenset[str] = frozenset()

    def on_step(self, state: TrainState) -> None:
        """Compare when due; warn of names that have not deviated before."""
        if self._reference is None or not (is_recorded(state.progress.steps) or self._every.due(state.progress)):
            return
        if (found := _compared(state, self._reference)) is not None:
            names = frozenset(one.name for one in found.deviations)
            if names - self._told:
                log.warning(f"{state.folder}: {in_log(found, f'the preset {self._reference.name}')}")
            self._told |= names

    def on_end(self, state: TrainState) -> None:
        """Say whether the run was as its recipe."""
        if self._reference is not None and (found := _compared(state, self._reference)) is not None and found.compared:
            say = log.warning if found.deviations else log.info
            say(f"{state.folder}: {in_log(found, f'the preset {self._reference.name}')}")


def _compared(state: TrainState, reference: Reference) -> Conformance | None:
    try:
        return compare(read_numbers(state.folder, reference.windows), reference)
    except OSError as error:
        log.warning(f"not compared with the preset {reference.name}: {error.filename}: {error.strerror}")
        return None


def _reference_of(state: TrainState, preset: str | None) -> Reference | None:
    """Return the reference of a run; say why the run of a preset that ships one is not compared with it."""
    for name in shipped_names():
        reference = shipped(name)
        assert reference is not None
        changes = config_changes(dict(reference.config), as_json(state.config), MAY_DIFFER)
        if not changes:
            return reference
        if name == preset:
            told = ", ".join(f"--{field}: {change}" for field, change in list(changes.items())[:_SHOWN])
            more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
            log.info(
                f"not compared with the reference of the preset {name}, as the configuration differs: {told}{more}"
            )
    return None
