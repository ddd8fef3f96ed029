"""Compilation before the first step, of every latent size that the run will meet.

Otherwise each first batch of an aspect-ratio bucket would stop all ranks for minutes in the midst of the training.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor, nn

from fastdiff.batch import Batch
from fastdiff.console import log
from fastdiff.data.loading.batches import empty_batch
from fastdiff.data.loading.bucket_order import BucketOrder
from fastdiff.models.compile_clock import compiled
from fastdiff.training.memory.explanation import out_of_memory
from fastdiff.training.memory.halving import first_cause, run_within_memory
from fastdiff.training.metrics import peak_bytes
from fastdiff.training.state import TrainState

_PHASE = "the first forward and backward pass"


def compile_all(state: TrainState) -> str | None:
    """Run one micro-batch of zeros of every latent size forward and backward; called by all ranks.

    Gradients, optimizer, losses of the log and the history of the timesteps stay as they are, and no random number
    depends on what was drawn before.

    Returns:
        On every rank, where and why the memory of one did not suffice (``memory.halving``); None if it did.
    """
    with state.ledger.account("compile"):
        _compile_all(state)
        return first_cause(state)


def _compile_all(state: TrainState) -> None:
    began, graphs, config = time.perf_counter(), compiled.graphs, state.config
    info, order = state.reader.info, state.order
    buckets = order.buckets if isinstance(order, BucketOrder) else (info.shards[0].bucket,)
    for number, bucket in enumerate(buckets, 1):
        state.heartbeat.beat(state.progress.steps, "start")
        batch = empty_batch(info, bucket, config.batch.per_rank(state.world.size), state.world.device)
        if state.world.is_first:
            height, width = batch.latents.shape[2:]
            log.info(f"compiling the blocks for latents of {height}x{width}, size {number} of {len(buckets)}")
        adapter = config.lora.rank > 0 and state.engine.stage < 3
        try:
            run_within_memory(partial(_rehearse, by_parameters=adapter), state, batch, phase=_PHASE)
        except Exception as error:
            if (told := out_of_memory(error, state, _PHASE)) is None:
                raise
            raise told from error
    if state.world.device.type == "cuda":
        torch.cuda.empty_cache()  # of sizes whose blocks fit no other
    if state.world.is_first:
        seconds = time.perf_counter() - began
        log.info(f"compiled {compiled.graphs - graphs} graphs in {seconds:.1f} s; latent sizes: {len(buckets)}")


def _rehearse(state: TrainState, batch: Batch, *, by_parameters: bool) -> None:
    """Run ``batch`` forward and backward, and keep nothing.

    Args:
        state: the run.
        batch: of this rank.
        by_parameters: whether to differentiate by the trained parameters, which are few, instead of the input. In a
            network with an adapter the first blocks get no input with a gradient, and have other graphs with one.
    """
    objective = state.objective

    def forward(network: nn.Module) -> tuple[Tensor, list[Tensor]]:
        corruption = objective.corrupt(batch, network)
        leaves: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        if not by_parameters:
            leaves = [corruption.noisy.requires_grad_()]
        prediction = network(corruption.noisy, corruption.time, **corruption.condition)
        return objective.loss(prediction, batch, corruption, recorded=False).mean(), leaves

    device = state.world.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else peak_bytes(device)
    try:
        state.engine.rehearse(forward)
    finally:
        state.first_pass_bytes = max(state.first_pass_bytes, peak_bytes(device) - before)
