"""The network of a run and its engine, with the initial, pretrained or saved weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.run import RunConfig
from fastdiff.console import log
from fastdiff.errors import ConfigError
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

    Under ZeRO-3 no rank holds the whole network, unless it is the frozen one of a LoRA or ``ModelFamily`` forbids it.
    Called by all ranks.
    """
    draws = saved is None and not config.pretrained.weights
    whole = config.lora.rank > 0 or (draws and not family_of(config.model).draws_on_meta)
    if world.is_first and (saved is not None or config.pretrained.weights):
        log.info(f"loading the weights of {saved.folder if saved is not None else config.pretrained.path}")
    apart = deepspeed_config.zero_stage(ds_config) == 3 and not whole
    # Restore weights before DeepSpeed casts and shards them, so that the working copies match the masters.
    model, weights = world.on_all_ranks(lambda: _build_model(config, world, saved, apart=apart))
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
            model, weights = load.build_network(config, None if saved is None else saved.weights()), iter(())
    kernel_choice.prepare_blocks(model, config.performance, world.device)
    return model, weights


@contextmanager
def _naming(saved: Checkpoint | None) -> Iterator[None]:
    """Begin a message about weights with the checkpoint that has them."""
    try:
        yield
    except ConfigError as error:
        raise error if saved is None else ConfigError(f"{saved.folder}: {error}") from None
