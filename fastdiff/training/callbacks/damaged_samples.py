"""Record of replaced samples in ``damaged.jsonl``, and the limit of their number (``--data.damaged skip``)."""

from fastdiff.console import log
from fastdiff.data.joined.reader import Shards
from fastdiff.data.shards.reader import Substitution
from fastdiff.errors import DataError
from fastdiff.progress import Every
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.state import TrainState

SHARE, LEAST = 0.001, 10
"""Limit of replaced samples: a share of the samples seen, and at least this number."""


class DamagedSamples(Callback):
    """Counter of replaced samples over all ranks and all starts of the run.

    It counts when the log is written, before every save and before a rewind, so that the record covers all samples that
    a checkpoint has seen. A resumed run therefore has the same count, and ends at the same step on any number of ranks.
    """

    def __init__(self, state: TrainState) -> None:
        self._path = state.folder / "damaged.jsonl"
        output = state.config.output
        self._when = Every(output.log_every), Every(output.checkpoint_every)
        self._total = self._recorded(state)

    def on_step(self, state: TrainState) -> None:
        """Record and count when due; raise DataError above the limit."""
        flags = state.guard.flags
        rewinds = state.config.divergence.policy == "rewind" and state.guard.spikes.is_spike(
            flags.loss_sum, flags.loss_count, applied=state.applied
        )
        last = rewinds or flags.stop or flags.save_due or state.progress.samples >= state.config.samples
        if last or any(every.due(state.progress) for every in self._when):
            self._take(state)

    def on_preempted(self, state: TrainState) -> None:
        """Record and count up to the step that is going to be saved; raise DataError above the limit."""
        self._take(state)

    def _take(self, state: TrainState) -> None:
        found = sorted(entry for share in state.world.gather(_replaced(state)) for entry in share)
        self._total += len(found)
        state.world.on_rank0(lambda: self._write(state, found))
        limit = max(LEAST, SHARE * state.progress.samples)
        if self._total > limit:
            raise DataError(
                f"{self._total} of {state.progress.samples} samples were damaged, more than {limit:.0f}, up to step "
                f"{state.progress.steps}; they are listed in {self._path}. Restore the shards (`fastdiff verify` lists "
                "all damage), then run the same command again: it resumes from the newest checkpoint",
                everywhere=True,
            )

    def _write(self, state: TrainState, found: list[tuple[int, Substitution]]) -> None:
        if not found:
            return
        for position, each in found:
            step = position // state.config.batch.samples + 1
            fields = {"key": each.damaged, "by": each.by, "reason": each.reason}
            self._lines.write({"step": step, "position": position, **fields})
        first = found[0][1]
        log.warning(
            f"up to step {state.progress.steps}, {len(found)} more damaged samples were replaced (in all "
            f"{self._total}, listed in {self._path}), the first, {first.damaged}, by {first.by}: {first.reason}"
        )

    def _recorded(self, state: TrainState) -> int:
        """Count the records so far, and remove later ones."""
        self._lines = state.json_lines(self._path.name)
        return state.world.on_rank0(self._lines.count)


def _replaced(state: TrainState) -> list[tuple[int, Substitution]]:
    """Return the replacements of this rank in finished steps; batches of later steps may have been read already."""
    assert isinstance(state.reader, Shards)
    pending = state.reader.substituted
    behind = [position for position in list(pending) if position < state.progress.samples]
    return [(position, pending.pop(position)) for position in behind]
