"""Rehearsal: every shape of the run once before the first step, so that none stops the training later.

It compiles the blocks for all latent sizes (otherwise each first batch of an aspect-ratio bucket would stop all ranks
for minutes), and meets a lack of memory while nothing can be lost.
"""

import logging
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.console import log
from fastdiff.data.loading.batches import empty_batch
from fastdiff.models import kernel_choice
from fastdiff.models.compile_clock import compiled
from fastdiff.training.callbacks.base import Callbacks
from fastdiff.training.memory.explanation import explaining_memory
from fastdiff.training.metrics import peak_bytes
from fastdiff.training.state import TrainState

_PHASE = "the first forward and backward pass"


def rehearse(state: TrainState, callbacks: Callbacks) -> None:
    """Take a step of zeros that changes nothing for every latent size, then the work of the callbacks; on all ranks.

    Weights, optimizer, averages, losses of the log and the history of the timesteps stay as they are, and no random
    number depends on what was drawn before. It costs at most one step for each size, and one forward pass for each
    validation or drawing.

    Raises:
        OutOfMemoryRestart: the memory of this rank does not suffice; a smaller micro-batch may fit.
        NoMemoryError: it does not suffice for one sample.
    """
    began = time.process_time()
    with state.ledger.account("compile"):
        _rehearse_sizes(state)
        with explaining_memory(state, "a first validation or drawing"):
            callbacks.rehearse(state)
    state.ledger.rehearsed(time.process_time() - began)


def _rehearse_sizes(state: TrainState) -> None:
    began, graphs, anew, from_cache = time.perf_counter(), compiled.graphs, compiled.anew, compiled.from_cache
    info, order, device = state.reader.info, state.order, state.world.device
    buckets = order.buckets or (info.shards[0].bucket,)
    for number, bucket in enumerate(buckets, 1):
        state.heartbeat.beat(state.progress.steps, "start")
        batch = empty_batch(info, bucket, state.config.batch.per_rank(state.world.size), device)
        if state.world.is_first:
            height, width = batch.latents.shape[2:]
            compiles = kernel_choice.compiles(state.config.performance, device)
            what = "compiling the blocks" if compiles else "rehearsing a step"
            told = f"{what} for latents of {height}x{width}, size {number} of {len(buckets)}"
            log.log(logging.INFO if compiles else logging.DEBUG, told)
        _rehearse_step(state, batch)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of sizes whose blocks fit no other
    if state.world.is_first and compiled.graphs > graphs:
        seconds = time.perf_counter() - began
        loaded = compiled.anew == anew and compiled.from_cache > from_cache
        told = "loaded" if loaded else "compiled"
        log.info(f"{told} {compiled.graphs - graphs} graphs in {seconds:.1f} s; latent sizes: {len(buckets)}")


def _rehearse_step(state: TrainState, batch: Batch) -> None:
    """Take a step of this micro-batch, twice with accumulation, that changes nothing."""
    device, before = state.world.device, _bytes(state.world.device)

    def loss() -> Tensor:
        nonlocal before
        note_raised()
        before = _bytes(device)  # with the gradients of the micro-batch before
        return state.forward_backward.forward(batch, recorded=False)[0].mean()

    def note_raised() -> None:
        state.first_pass_bytes = max(state.first_pass_bytes, peak_bytes(device) - before)

    with explaining_memory(state, _PHASE):
        try:
            for _ in _each_kind(state):
                for _ in state.scales.each_form():
                    state.engine.rehearse(loss, accumulates=state.config.batch.accumulation(state.world.size) > 1)
        finally:
            state.scales.forget()
            note_raised()


def _each_kind(state: TrainState) -> Iterable[None]:
    """Take each kind of step in turn that is still to come: with and without all tokens."""
    routing = state.objective.routing
    return (None,) if routing is None else routing.each_kind(state.progress.samples)


def _bytes(device: torch.device) -> int:
    """Return the bytes in use; on a CPU the most so far."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else peak_bytes(device)
