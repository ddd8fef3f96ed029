"""``--batch.micro auto``: the largest micro-batch whose memory is predicted to fit this machine.

The losses do not depend on micro-batch, accumulation and ranks beyond rounding, so a run may continue with another one.
"""

import os
from dataclasses import replace

import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.conditions import of_source
from fastdiff.config.deepspeed import DsConfig
from fastdiff.config.engine import choose
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.batch import micro_batches
from fastdiff.console import log
from fastdiff.data.loading.batches import empty_batch
from fastdiff.data.loading.training_set import Data
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.errors import ConfigError
from fastdiff.models.build import Model
from fastdiff.models.cost.dry_network import dry_inputs, dry_network
from fastdiff.models.cost.memory import setup_of
from fastdiff.parallel.world import World
from fastdiff.planning.memory import RESERVED
from fastdiff.planning.network import TRACED, Network, read_network
from fastdiff.planning.options import memory_of
from fastdiff.training.zero.linear_layers import linear_layers_of

_MOST_ON_CPU = 16
"""Samples on a CPU, which gains nothing by more."""
_BUCKET = 500_000_000
"""DeepSpeed's default of ``reduce_bucket_size``, in elements."""


def with_micro(config: RunConfig, ds_config: DsConfig, data: Data, saved: Checkpoint | None, world: World) -> RunConfig:
    """Replace ``--batch.micro auto`` by a number, equal on all ranks; called by all ranks.

    A run that is resumed on as many ranks keeps its own, if that fits this machine: its losses stay equal to the bit.
    """
    if config.batch.micro != "auto":
        return config
    room = min(world.gather(_room(world)))

    def decide() -> int:
        manifest = None if saved is None else saved.manifest
        flat = choose(config.optim, config.performance, ds_config, manifest) == "flat"
        kept, encoders = _kept(saved, config.batch.samples, world.size), _encoder_bytes(data)
        return largest(
            config, ds_config, data.info, world.size, world.device, room, flat=flat, encoders=encoders, kept=kept
        )

    micro = world.on_rank0(decide)
    return replace(config, batch=replace(config.batch, micro=micro))


def _room(world: World) -> int:
    """Return the bytes that a rank can use; not what is free, which differs from start to start."""
    if world.device.type == "cuda":
        return int(torch.cuda.get_device_properties(world.device).total_memory) - RESERVED
    ranks = int(os.environ.get("LOCAL_SIZE", world.size))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // ranks


def _kept(saved: Checkpoint | None, samples: int, ranks: int) -> int | None:
    """Return the micro-batch of the run that is resumed on as many ranks, if it had one that divides the batch."""
    if saved is None or saved.manifest.get("world_size") != ranks:
        return None
    batch = saved.manifest["config"]["batch"]
    micro = batch["samples"] // ranks if batch["micro"] is None else batch["micro"]
    fits = isinstance(micro, int) and micro > 0 and samples % (micro * ranks) == 0
    return micro if fits else None


def _encoder_bytes(data: Data) -> int:
    """Return the bytes of a rank that the encoders of online data need; 0 for shards."""
    from fastdiff.data.loading.online import OnlineImages

    return data.encoder_bytes() if isinstance(data, OnlineImages) else 0


def largest(
    config: RunConfig, ds_config: DsConfig, info: DatasetInfo, ranks: int, device: torch.device, room: int,
    *, flat: bool = False, encoders: int = 0, kept: int | None = None,
) -> int:  # fmt: skip
    """Return the largest micro-batch that divides the samples of a rank and is predicted to fit into a memory.

    1 if none does: a run that is out of memory says what would help.

    Args:
        config: of the run.
        ds_config: the DeepSpeed JSON, resolved but for the micro-batch.
        info: the data.
        ranks: number of ranks.
        device: of the run.
        room: bytes of a rank.
        flat: the run has the flat engine.
        encoders: bytes that online data need beside the step.
        kept: the micro-batch of the run that is resumed, returned if it is predicted to fit.
    """
    share = config.batch.samples // ranks
    network = _network(config, ds_config, info, device)
    sizes = micro_batches(share, config.objective.samples_together) or [1]
    if device.type == "cpu":
        sizes = [size for size in sizes if size <= _MOST_ON_CPU]
    bucket = int(ds_config.get("zero_optimization", {}).get("reduce_bucket_size", _BUCKET))

    def need(size: int) -> float:
        own = replace(config, batch=replace(config.batch, micro=size))
        setup = setup_of(
            own, ds_config, ranks, flat=flat, trained=network.trained, in_matrices=network.in_matrices,
            frozen_bytes=network.frozen_bytes, buffer_bytes=network.buffer_bytes, blocks=network.blocks,
        )  # fmt: skip
        return encoders + memory_of(own, setup, network, bucket=bucket, on_cpu=device.type == "cpu").peak

    if kept is not None and need(kept) <= room:
        return kept
    micro = next((size for size in sizes if need(size) <= room), sizes[-1])
    if kept not in (None, micro):
        log.warning(
            f"--batch.micro auto: the {kept} of the run that is resumed needs {_gib(need(kept))} GiB, and a rank has "
            f"{_gib(room)} GiB here: it continues with {micro}, its losses are equal up to rounding"
        )
    log.info(
        f"--batch.micro auto: {micro} of {share} samples per rank; {_gib(need(micro))} of {_gib(room)} GiB"
        + (f", encoders {_gib(encoders)} GiB" if encoders else "")
    )
    return micro


def _network(config: RunConfig, ds_config: DsConfig, info: DatasetInfo, device: torch.device) -> Network:
    """Count the network of the run on the largest latents of its data."""
    inputs = _inputs(dry_network(config), info)
    try:
        with linear_layers_of(ds_config):
            return read_network(config, device, inputs)
    except ConfigError as error:
        raise ConfigError(f"--batch.micro auto: {error}; or give a number") from error


def _inputs(network: Model, info: DatasetInfo) -> tuple[Tensor, Condition]:
    """Return inputs of the network for two samples of the largest latents of the data."""
    areas = [height * width for height, width in info.buckets] or [0]
    batch = empty_batch(info, areas.index(max(areas)), TRACED, torch.device("cpu"))
    model = network.config
    _, made = dry_inputs(model, of_source("step", network.inputs), TRACED)
    condition = {**batch.condition, **made}
    noisy = batch.latents[:, : model.channels]  # of a posterior the means
    return noisy, {name: value for name, value in condition.items() if name in network.inputs}


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
