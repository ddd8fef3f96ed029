"""Handling of divergence: non-finite steps and loss spikes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from fastdiff.checkpoint.manifest import committed
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.console import log
from fastdiff.errors import DivergedError, Preempted
from fastdiff.json_lines import JsonLines, Record
from fastdiff.progress import Progress
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.callbacks.saving import remove_after
from fastdiff.training.checkpoints import Checkpoints
from fastdiff.training.spikes import Spike
from fastdiff.training.state import TrainState

_KEYS = 16
"""Samples that are recorded."""
_NAMED = 4
"""Samples that a message names."""
_SPIKES = "spikes.jsonl"


class NonFiniteGuard(Callback):
    """Report of the samples that made a step non-finite; it ends the run after three skipped steps in a row.

    The engine has already skipped the step. Under fp16 a skipped step with finite losses is part of the search for the
    loss scale: it is only reported, and the engine stops the run at the smallest scale.
    """

    limit = 3

    def __init__(self, state: TrainState) -> None:
        self._lines = state.json_lines("skipped.jsonl")

    def on_step(self, state: TrainState) -> None:
        """Log a skipped step with the keys of its non-finite samples; raise DivergedError at the third in a row."""
        if state.applied or state.guard.discarded:
            return
        bad = [position for share in state.world.gather(_non_finite(state)) for position in share]
        keys = _keys(state, bad)
        which, remedy = _told(keys, len(bad), state.config.batch.samples)
        record = {"step": state.progress.steps, "samples": len(bad), "keys": keys, **state.engine.loss_scale}
        state.world.on_rank0(lambda: _note(f"step {state.progress.steps} skipped, {which}", self._lines, record))
        is_scale_search = not bad and state.config.performance.precision == "fp16"
        if state.progress.skipped_in_a_row >= self.limit and not is_scale_search:
            raise DivergedError(
                f"{state.progress.skipped_in_a_row} steps in a row had to be skipped, up to step "
                f"{state.progress.steps}; {which}; {remedy}. {_goes_on(state)}"
            )


def _told(keys: Sequence[str], bad: int, batch: int) -> tuple[str, str]:
    """Return which of the losses of a step are not finite, and what to do if it goes on."""
    remedy = "lower --optim.lr, or use --performance.precision bf16"
    if bad == 0:
        return "all losses are finite, the gradient is not", remedy
    if bad == batch:
        return f"none of its {batch:,} losses is finite", remedy
    more = f" and {bad - _NAMED:,} more" if bad > _NAMED else ""
    return f"non-finite samples: {', '.join(keys[:_NAMED])}{more}", f"check those samples, {remedy}"


def _goes_on(state: TrainState) -> str:
    """Return how the same command goes on; called by all ranks."""
    if state.world.on_rank0(lambda: bool(committed(state.folder / "checkpoints"))):
        return "The checkpoints before are intact: the same command resumes from the newest"
    return "There is no checkpoint yet: the same command begins anew"


def _non_finite(state: TrainState) -> list[int]:
    """Return the positions of this rank's non-finite samples in the last step."""
    bad = torch.cat([position[~torch.isfinite(losses)] for position, losses in state.meters.step])
    return bad.tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Rewind:
    """Return to a checkpoint before a spike, and continuation after the spike."""

    spiked: Progress
    """Progress of the run after the spike."""
    spike: str
    """Description of the spike for messages."""

    def find(self, checkpoints: Checkpoints) -> Checkpoint:
        """Return the newest intact checkpoint before the spike; called by all ranks; DivergedError if there is none."""
        saved = checkpoints.newest(before=self.spiked.steps)
        if saved is None:
            raise DivergedError(
                f"{self.spike}, and there is no checkpoint before it to go back to; write the first one earlier, with "
                "a lower --output.checkpoint_every, or use --divergence.policy skip or log; as nothing is saved, the "
                "run starts anew in the same --output.folder"
            )
        return saved

    def go_behind(self, state: TrainState) -> None:
        """Advance ``state``, restored from that checkpoint, past the spike; called by all ranks.

        Noise, order and schedules need nothing else: they are functions of the position and of the applied steps.
        Snapshots of the abandoned steps are deleted: post-hoc averages need a single history of the weights.
        """
        before = state.progress
        state.progress = before.behind(self.spiked)
        state.meters.reset()  # of abandoned steps; their log records stay
        remove_after(state, before.steps)
        state.ledger.rewind(state.progress.steps, to=before.steps)
        state.world.on_rank0(lambda: self._log(state, before))

    def _log(self, state: TrainState, before: Progress) -> None:
        ends = [before.samples, self.spiked.samples - 1]
        first, last = state.reader.keys(state.order.samples(ends))
        log.warning(
            f"rewind {state.progress.rewinds} of {state.config.divergence.limit}: {self.spike}; continuing from the "
            f"weights of step {before.steps}, without the {self.spiked.samples - before.samples} samples after it"
        )
        record = {"step": self.spiked.steps, "rewound_to": before.steps, "rewinds": state.progress.rewinds}
        state.lines[_SPIKES].write({**record, "positions": ends, "first_key": first, "last_key": last})


class RewindRequest(Exception):
    """Request for a rewind after a spike; raised by all ranks after the same step."""

    def __init__(self, rewind: Rewind) -> None:
        super().__init__(rewind.spike)
        self.rewind = rewind


class SpikeGuard(Callback):
    """Report of the samples of a loss spike, and its handling according to ``config.divergence``."""

    def __init__(self, state: TrainState) -> None:
        self._lines = state.json_lines(_SPIKES)

    def on_preempted(self, state: TrainState) -> None:
        """Prevent, by Preempted on all ranks, the save of a step that a rewind would undo."""
        if state.guard.spikes.last is not None and state.config.divergence.policy == "rewind":
            raise _stopped_at_spike(state)

    def on_step(self, state: TrainState) -> None:
        """Judge the step.

        Raises:
            RewindRequest: on all ranks, under the policy rewind.
            Preempted: likewise, if the run was asked to stop; the next start meets the spike again.
            DivergedError: on all ranks, when the spikes exceed the limit.
        """
        flags = state.guard.flags
        spike = state.guard.spikes.see(flags.loss_sum, flags.loss_count, applied=state.applied)
        if spike is None:
            return
        keys = _largest_keys(state)
        what = (
            f"step {state.progress.steps} is a spike: loss {spike.loss:.4g}, threshold {spike.threshold:.4g}; its "
            f"largest losses: {', '.join(keys[:_NAMED])}"
        )
        record = {"step": state.progress.steps, "policy": state.config.divergence.policy, **asdict(spike), "keys": keys}
        state.world.on_rank0(lambda: _note(what, self._lines, record))
        _act(state, spike, what)


def _act(state: TrainState, spike: Spike, what: str) -> None:
    policy, limit = state.config.divergence.policy, state.config.divergence.limit
    if policy == "log":
        if spike.in_a_row == limit:
            state.guard.spikes.forget()
            if state.world.is_first:
                log.warning(f"{limit} spikes in a row: the statistics of the loss start anew")
        return
    done = spike.in_a_row - 1 if policy == "skip" else state.progress.rewinds
    if done >= limit:
        how = f"{limit} steps in a row were skipped" if policy == "skip" else f"the run was rewound {limit} times"
        raise DivergedError(
            f"{what}. Before it {how} (--divergence.limit): check those samples, or lower --optim.lr with "
            "--allow-change optim.lr; if such losses are right, raise --divergence.limit, or --divergence.sigmas with "
            f"--allow-change divergence.sigmas. {_goes_on(state)}"
        )
    if policy == "rewind":
        if state.guard.flags.stop:
            raise _stopped_at_spike(state)
        raise RewindRequest(Rewind(state.progress, what))


def _stopped_at_spike(state: TrainState) -> Preempted:
    return Preempted(
        f"asked to stop at step {state.progress.steps}, a spike, which is not saved; the same command resumes from the "
        "newest checkpoint before it"
    )


def _largest_keys(state: TrainState) -> list[str]:
    """Return the names of the samples with the largest losses of the last step, largest first; called by all ranks."""
    positions = torch.cat([position for position, _ in state.meters.step])
    losses = torch.cat([losses for _, losses in state.meters.step])
    top = losses.topk(min(_KEYS, len(losses)))
    mine = list(zip(top.values.tolist(), positions[top.indices].tolist(), strict=True))
    largest = sorted(
        (pair for share in state.world.gather(mine) for pair in share), key=lambda pair: (-pair[0], pair[1])
    )
    return _keys(state, [position for _, position in largest])


def _keys(state: TrainState, positions: Sequence[int]) -> list[str]:
    """Return the names of the first samples at ``positions``, equal on every rank; called by all ranks."""
    chosen = positions[:_KEYS]
    return state.world.on_rank0(lambda: state.reader.keys(state.order.samples(chosen))) if chosen else []


def _note(warning: str, lines: JsonLines, record: Record) -> None:
    log.warning(warning)
    lines.write(record)
