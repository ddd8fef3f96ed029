"""The network of a run and its engine, with the initial, pretrained or saved weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.networks.adapter_rank import layers_of_text_encoders
from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.errors import ConfigError, require
from fastdiff.models import kernel_choice, load
from fastdiff.models.build import Model
from fastdiff.models.family import family_of
from fastdiff.parallel.world import World
from fastdiff.training.engines import build as engines
from fastdiff.training.engines.base import Engine


def build_engine(
    config: RunConfig, ds_config: deepspeed_config.DsConfig, world: World, saved: Checkpoint | None
) -> tuple[Model, Engine]:
    """Build the network and its engine, with the initial, pretrained or saved weights.

    Under ZeRO-3 no rank holds the whole network, unless frozen weights are quantised or ``ModelFamily`` forbids it.
    Called by all ranks.
    """
    draws = saved is None and not config.pretrained.weights
    whole = config.lora.quantize != "none" or (draws and not family_of(config.model).draws_on_meta)
    if world.is_first and (saved is not None or config.pretrained.weights):
        log.info(f"loading the weights of {saved.folder if saved is not None else config.pretrained.path}")
    if world.is_first and saved is None and config.lora.skip_text_encoders:
        count = layers_of_text_encoders(Path(config.lora.init))
        log.warning(f"{config.lora.init}: its {count} layers of text encoders are left out (--lora.skip-text-encoders)")
    apart = deepspeed_config.zero_stage(ds_config) == 3 and not whole
    # Restore weights before DeepSpeed casts and shards them, so that the working copies match the masters.
    model, weights = world.on_all_ranks(lambda: _build_model(config, world, saved, apart=apart))
    take_weights_of_rank0(model, world)
    manifest = None if saved is None else saved.manifest
    engine = engines.build_engine(model, config, ds_config, world, model.block_classes, manifest)
    world.on_all_ranks(lambda: engine.fill(weights))
    if apart and saved is not None:
        world.on_all_ranks(lambda: engine.return_to(partial(saved.slice, "master")))
    return model, engine


def _build_model(
    config: RunConfig, world: World, saved: Checkpoint | None, *, apart: bool
) -> tuple[Model, Iterable[tuple[str, Tensor]]]:
    """Build the network; ``apart``: on ``meta``, with the weights to fill in that are not in a checkpoint."""
    if saved is not None:
        saved.require("parameters")
    with _naming(saved):
        if apart:
            model, weights = load.build_on_meta(config, None if saved is None else saved.manifest["parameters"])
        else:
            frozen = kernel_choice.DTYPES[config.performance.precision]
            trained = None if saved is None else saved.weights()
            model, weights = load.build_network(config, trained, frozen=frozen), iter(())
    kernel_choice.prepare_blocks(model, config.performance, world.device)
    return model, weights


@torch.no_grad()
def take_weights_of_rank0(model: Model, world: World) -> None:
    """Replace parameters and buffers by those of rank 0, and warn if a rank had others; called by all ranks.

    From then on the ranks exchange gradients alone, so a difference would last: that of nodes which read other files.
    DistributedDataParallel and DeepSpeed broadcast the rounded weights alone, and a CUDA graph has neither of them.
    Tensors on ``meta`` are left out: ``Engine.fill`` sets them, of each parameter the part of this rank.

    Raises:
        ConfigError: on all ranks, if a rank has other names, shapes or dtypes than rank 0.
    """
    if world.size == 1:
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    found = {name: tensor for name, tensor in named if not tensor.is_meta}
    _require_equal_shapes({name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in found.items()}, world)
    differing = [name for name, tensor in found.items() if _take_of_rank0(tensor, world)]
    for rank, names in enumerate(world.gather(differing)):
        if names and world.is_first:
            log.warning(
                f"rank {rank} had other values than rank 0 in {len(names)} of the {len(found)} tensors of the network, "
                f"first in {names[0]}: all ranks take those of rank 0; check that all nodes have the same files"
            )


def _require_equal_shapes(own: dict[str, str], world: World) -> None:
    first, *others = world.gather(own)
    for rank, found in enumerate(others, start=1):
        for name in sorted(first.keys() | found.keys()):
            ours, theirs = first.get(name, "none"), found.get(name, "none")
            require(
                ours == theirs,
                f"the network of rank {rank} has {name}: {theirs}, that of rank 0 {ours}; start all ranks with the "
                "same flags and files",
            )


def _take_of_rank0(tensor: Tensor, world: World) -> bool:
    """Replace a tensor by that of rank 0, as bytes on the device of the ranks; return whether it was another one."""
    own = tensor.to(world.device).reshape(-1).view(torch.uint8)
    first = world.broadcast_(own.clone())
    if torch.equal(first, own):
        return False
    tensor.copy_(first.view(tensor.dtype).view(tensor.shape))
    return True


@contextmanager
def _naming(saved: Checkpoint | None) -> Iterator[None]:
    """Begin a message about weights with the checkpoint that has them."""
    try:
        yield
    except ConfigError as error:
        raise error if saved is None else ConfigError(f"{saved.folder}: {error}") from None
