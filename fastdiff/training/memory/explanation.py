"""The error of a rank that is out of memory, explained by the memory of its run."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch

from fastdiff.config.deepspeed import DsConfig, offloads_optimizer
from fastdiff.config.run import RunConfig
from fastdiff.errors import FastdiffError, NoMemoryError
from fastdiff.models.cost import memory
from fastdiff.models.cost.dry_network import dry_network
from fastdiff.models.matrices import elements_in, matrices_of
from fastdiff.parallel.world import World
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


@contextmanager
def explaining_construction(config: RunConfig, ds_config: DsConfig, world: World, *, flat: bool) -> Iterator[None]:
    """Turn an allocator's error while a run is built into the one that ends this rank; any other passes.

    What network, optimizer and averages need does not depend on the micro-batch, so that no smaller one helps.

    Args:
        config: of the run.
        ds_config: the resolved DeepSpeed JSON.
        world: the ranks.
        flat: the run has the flat engine.

    Raises:
        NoMemoryError: with the changes of the training that are predicted to fit.
    """
    try:
        yield
    except Exception as error:
        phase, whose = "the construction of network, optimizer and averages", _whose(error)
        if whose is None:
            raise
        if whose == "host" and world.device.type == "cuda":
            raise _of_host(error, phase, config, ds_config) from error
        network, precision = dry_network(config), config.performance.precision
        shapes = {name: tuple(p.shape) for name, p in network.named_parameters() if p.requires_grad}
        setup = memory.setup_of(
            config,
            ds_config,
            world.size,
            flat=flat,
            trained=sum(map(math.prod, shapes.values())),
            in_matrices=elements_in(matrices_of(config, shapes), shapes),
            frozen_bytes=memory.frozen_bytes(network, precision),
            buffer_bytes=memory.buffer_bytes(network),
            blocks=len(network.blocks_in_order()),
        )
        # As if it had the remedies that lower activations alone: they are not advised.
        least = replace(setup, micro=1, recompute=True, stored=0.0)
        raise _without_a_smaller(error, phase, least, world, 0.0) from error


def _whose(error: Exception) -> Literal["host", "gpu"] | None:
    """Return whose memory an error says to be exhausted; None: neither's, or it is already explained."""
    return None if isinstance(error, FastdiffError) else memory.exhausted(error)


def _explained(
    error: Exception, phase: str, state: TrainState, advice: str | None, *, halves: bool
) -> FastdiffError | None:
    whose, device = _whose(error), state.world.device
    if whose is None:
        return None
    if whose == "host" and device.type == "cuda":
        return _of_host(error, phase, state.config, state.engine.ds_config)
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    what = f"out of memory in {phase} on {device} ({reason})"
    if halves and (restart := halve(state, what)) is not None:
        return restart
    if advice:
        return NoMemoryError(f"{what}: {advice}")
    setup = _setup(state)
    beyond = peak_bytes(device) - sum(setup.static().values())
    # The first pass precedes the moments and sums of gradients, which are in ``setup``: it says more than the peak.
    return _without_a_smaller(error, phase, setup, state.world, max(0.0, beyond, state.first_pass_bytes))


def _of_host(error: Exception, phase: str, config: RunConfig, ds_config: DsConfig) -> NoMemoryError:
    """Return the error of a rank on a GPU for which the memory of its host does not suffice."""
    online, offload = config.data.online, offloads_optimizer(ds_config)
    return NoMemoryError(memory.explain_host(phase, online=online, offload=offload, cause=str(error)))


def _without_a_smaller(
    error: Exception, phase: str, setup: memory.Setup, world: World, activations: float
) -> NoMemoryError:
    """Return the error of a run that no smaller micro-batch helps, with the changes that are predicted to fit."""
    cache, room = _cache_and_room(world.device, world.size)
    return NoMemoryError(
        memory.explain(
            setup,
            phase=phase,
            device=str(world.device),
            activations=activations,
            cache=cache,
            room=room,
            cause=str(error),
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
        in_matrices=elements_in(engine.matrices, engine.shapes),
        frozen_bytes=engine.frozen_bytes,
        buffer_bytes=engine.buffer_bytes,
        blocks=len(dry_network(state.config).blocks_in_order()),
    )


def _cache_and_room(device: torch.device, ranks: int) -> tuple[int, int]:
    """Return the bytes that the allocator holds beyond those in use, and those that this rank can have."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device)
        # Not the whole card: CUDA, NCCL and other processes have their part of it.
        return reserved - torch.cuda.memory_allocated(device), reserved + torch.cuda.mem_get_info(device)[0]
    ranks = int(os.environ.get("LOCAL_SIZE", ranks))
    return 0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
