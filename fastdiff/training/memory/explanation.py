"""The error of a rank that is out of memory, explained by the memory of its run."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastdiff.config.deepspeed import offloads_optimizer
from fastdiff.errors import FastdiffError, NoMemoryError
from fastdiff.models.cost import memory
from fastdiff.training.memory.smaller_batch import halve
from fastdiff.training.metrics import peak_bytes
from fastdiff.training.state import TrainState


@contextmanager
def explaining_memory(
    state: TrainState, phase: str | None = None, advice: str | None = None, *, halves: bool = True
) -> Iterator[None]:
    """Turn an allocator's error into the one that ends this rank; any other passes.

    Args:
        state: of the run.
        phase: the part of the run that needs the memory; None: that of the heartbeat.
        advice: what helps at a single sample; None: the changes of the training that are predicted to fit.
        halves: whether a smaller micro-batch needs less.

    Raises:
        OutOfMemoryRestart: a smaller micro-batch may fit; the run folder remembers it (``memory.smaller_batch``).
        NoMemoryError: there is none, or the host of a GPU has no memory; with what helps.
    """
    try:
        yield
    except Exception as error:
        if (told := _explained(error, phase or state.heartbeat.phase, state, advice, halves=halves)) is None:
            raise
        raise told from error


def _explained(
    error: Exception, phase: str, state: TrainState, advice: str | None, *, halves: bool
) -> FastdiffError | None:
    whose = None if isinstance(error, FastdiffError) else memory.exhausted(error)
    if whose is None:
        return None
    device = state.world.device
    if whose == "host" and device.type == "cuda":
        online, offload = state.config.data.online, offloads_optimizer(state.engine.ds_config)
        return NoMemoryError(memory.explain_host(phase, online=online, offload=offload, cause=str(error)))
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    what = f"out of memory in {phase} on {device} ({reason})"
    if halves and (restart := halve(state, what)) is not None:
        return restart
    return NoMemoryError(f"{what}: {advice}") if advice else _without_a_smaller(error, phase, state)


def _without_a_smaller(error: Exception, phase: str, state: TrainState) -> NoMemoryError:
    """Return the error of a run that has no smaller micro-batch, with the changes that are predicted to fit."""
    setup, device = _setup(state), state.world.device
    cache, room = _cache_and_room(device, state.world.size)
    beyond = peak_bytes(device) - sum(setup.static().values())
    # The first pass precedes the moments and sums of gradients, which are in ``setup``: it says more than the peak.
    activations = max(0.0, beyond, state.first_pass_bytes)
    return NoMemoryError(
        memory.explain(
            setup, phase=phase, device=str(device), activations=activations, cache=cache, room=room, cause=str(error)
        )
    )


def _setup(state: TrainState) -> memory.Setup:
    engine = state.engine
    return memory.setup_of(
        state.config,
        engine.ds_config,
        state.world.size,
        flat=engine.kind == "flat",
        trained=sum(math.prod(shape) for shape in engine.shapes.values()),
        frozen_bytes=engine.frozen_bytes,
        buffer_bytes=engine.buffer_bytes,
    )


def _cache_and_room(device: torch.device, ranks: int) -> tuple[int, int]:
    """Return the bytes that the allocator holds beyond those in use, and those that this rank can have."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device)
        # Not the whole card: CUDA, NCCL and other processes have their part of it.
        return reserved - torch.cuda.memory_allocated(device), reserved + torch.cuda.mem_get_info(device)[0]
    ranks = int(os.environ.get("LOCAL_SIZE", ranks))
    return 0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
