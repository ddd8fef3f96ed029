"""A micro-batch that a rank has no memory for: all ranks take the step again in micro-batches of half the size.

The losses do not depend on the micro-batch beyond rounding, because sample order and random numbers are functions of
the position in the run: the step begins again at the same positions, and the run goes on as itself.

A rank that runs out of memory must not leave the others in a collective, and cannot call them out of one. It does what
they expect of it instead, in three parts:

1. It forgets the pass, frees its memory, and repeats the pass on one sample. Of the collectives of the pass it takes
   part in those that it has not begun (``Engine.forget_pass``). The later micro-batches of the step run on one sample,
   too.
2. Every rank gets to the exchange of flags that ends each step (``parallel.consensus``), and learns there that the
   step is void: no weight, moment, average, counter or sum has changed, because the gradient of that rank is NaN.
3. All ranks take back what the step has recorded, halve the micro-batch, and begin the step again.

No rank waits for ever: the collectives of a micro-batch are the same in number, order and sizes for any number of
samples, so each one that a rank begins is begun by all of them. A rank that cannot repeat its pass on a single sample,
or whose memory ran out within a collective, which it may have begun or not, ends its process, which ends the run.
Which collectives there are:

- One rank: none that waits.
- ZeRO-0 and 1: reductions in the last backward pass of a step. With the flat engine the rank reduces NaN for the
  buckets that are left (``engines.data_parallel``).
- ZeRO-2: the same in each backward pass. ZeRO-3: also parameters, gathered in each forward and backward pass. With
  DeepSpeed the rank repeats the pass for them (``zero.catching_up``).
- The sum of the losses before the last backward pass, under ``--divergence.policy skip``.

Out of memory in the update halves nothing, see ``optimizer.second_try``. A micro-batch of one sample, a lack of
host memory beside a GPU, and one outside of these passes end the run with ``memory.explanation``. The size that was
found is part of the configuration in ``run.json`` and in each checkpoint: with ``--batch.micro auto`` a resume on as
many ranks keeps it, and one on others chooses anew. It never grows within a process: what did not fit once would cost a
step every time that it is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fastdiff.batch import Batch
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.run_record import as_json
from fastdiff.console import log
from fastdiff.errors import FastdiffError
from fastdiff.models.cost.memory import exhausted, half_of
from fastdiff.training.optimizer.second_try import free_memory
from fastdiff.training.state import TrainState


class TooLarge(RuntimeError):
    """Request for a smaller micro-batch, raised by all ranks after a void step; it tells of the first rank."""


BatchPass = Callable[[TrainState, Batch], None]
"""Runs a micro-batch of this rank forward and backward."""


def run_within_memory(run: BatchPass, state: TrainState, batch: Batch, *, phase: str | None = None) -> None:
    """Run a micro-batch forward and backward; called by all ranks.

    Args:
        run: the passes; a rank that has run out of memory in them runs them for its first sample.
        state: of the run.
        batch: of this rank.
        phase: the part of the run that needs the memory; None: that of the heartbeat.
    """
    guard = state.guard
    if guard.lost is not None:
        _run_one(run, state, batch)
        return
    before = guard.observed
    try:
        return run(state, batch)
    except Exception as error:
        if (cause := _cause(error, phase or state.heartbeat.phase, state)) is None:
            raise
        guard.lose(cause, observed=guard.observed > before)
    # Outside of the handler: the traceback would keep the activations.
    state.engine.forget_pass()
    free_memory()
    _run_one(run, state, batch)


def _run_one(run: BatchPass, state: TrainState, batch: Batch) -> None:
    """Run the first sample of a micro-batch, for the collectives alone."""
    with torch.compiler.set_stance("force_eager"):  # a size that never comes again
        run(state, batch.first(1))


def _cause(error: Exception, phase: str, state: TrainState) -> str | None:
    """Return where and why the memory of a pass did not suffice; None if half a micro-batch is no remedy."""
    whose = None if isinstance(error, FastdiffError) else exhausted(error)
    micro = state.config.batch.per_rank(state.world.size)
    if whose is None or micro == 1 or (whose == "host" and state.world.device.type == "cuda"):
        return None
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    return f"out of memory in {phase} on rank {state.world.rank} ({reason})"


def take_back(state: TrainState) -> TooLarge:
    """Forget what a void step has recorded, and return the request for a smaller micro-batch; called by all ranks."""
    state.meters.take_back()
    state.guard.spikes.take_back()
    state.objective.timesteps.take_back()
    cause = first_cause(state)
    assert cause is not None
    return TooLarge(cause)


def first_cause(state: TrainState) -> str | None:
    """Return on every rank where and why the first one ran out of memory, and forget it; None if none did."""
    lost, state.guard.lost = state.guard.lost, None
    return next((cause for cause in state.world.gather(lost) if cause is not None), None)


def halve(state: TrainState, cause: str) -> None:
    """Go on in micro-batches of half the size, or of the largest divisor below; called by all ranks between steps."""
    config, ranks = state.config, state.world.size
    micro = config.batch.per_rank(ranks)
    half = half_of(micro)
    state.config = config = replace(config, batch=replace(config.batch, micro=half))
    state.metadata = state.metadata | {"config": as_json(config)}
    accumulation = config.batch.accumulation(ranks)
    state.guard.accumulation = accumulation
    state.engine.resize(config, deepspeed_config.with_micro(state.engine.ds_config, config, ranks))
    if state.world.is_first:
        log.warning(
            f"{cause}: from step {state.progress.steps + 1} on in {accumulation} micro-batches of {half} samples per "
            f"rank, not {micro} (--batch.micro); the losses are equal up to rounding"
        )
