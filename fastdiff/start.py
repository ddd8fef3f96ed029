"""From a configuration to a run in memory: every part is built, checked against the others and restored."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fastdiff import deepspeed_config
from fastdiff.callbacks import Callback, Callbacks, Checkpointing, Log, NonFiniteGuard, SampleGrid, TrainState
from fastdiff.checkpoint import Checkpoints, check_unchanged
from fastdiff.config import RunConfig
from fastdiff.data import build_batches
from fastdiff.data.batches import Batches
from fastdiff.data.order import Order
from fastdiff.data.reader import LatentReader
from fastdiff.dist import World, attempt
from fastdiff.ema import Ema
from fastdiff.engine import Engine
from fastdiff.errors import ConfigError
from fastdiff.launch import Launch, as_json, claim, versions, write_run_json
from fastdiff.models import build_model, load_model
from fastdiff.models.dit import DiT, DiTBlock, compile_blocks
from fastdiff.progress import Progress
from fastdiff.saved import Saved


def build_run(
    config: RunConfig, launch: Launch, world: World, stack: ExitStack
) -> tuple[TrainState, Batches, Callbacks]:
    """Build the run, or restore it from its newest intact checkpoint; called by all ranks.

    Args:
        config: what to train.
        launch: the DeepSpeed JSON, and how to treat a run that is in the folder already.
        world: the ranks.
        stack: closes what is opened here.

    Raises:
        FastdiffError: a part does not fit the others, the folder is in use, or the data are damaged.
    """
    ds_config = deepspeed_config.resolve(launch.deepspeed, config, world.size)
    reader = stack.enter_context(_open_data(config, world))
    order = Order(config.seed, reader.shard_sizes, config.data.shuffle_shards)
    folder = Path(config.output.folder)
    world.on_first(lambda: _claim(folder, stack))
    facts: dict[str, Any] = {"config": as_json(config), "dataset": reader.info.digest, "versions": versions()}
    checkpoints = Checkpoints(folder / "checkpoints", config.output.keep, world)
    saved = _saved(checkpoints, launch, facts, folder)

    model = _build_model(config, world, saved)
    engine = Engine(model, config, ds_config, world, blocks=[DiTBlock])
    ema = Ema(engine.flats, config.ema.rates)
    progress = checkpoints.restore(saved, engine, ema, config.optim.name) if saved else Progress()
    device_name = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    world.on_first(lambda: write_run_json(folder, config, launch, ds_config, device_name))

    state = TrainState(config, world, engine, ema, reader, order, facts, progress)
    batches = stack.enter_context(_open_batches(state))
    callbacks: list[Callback] = [
        NonFiniteGuard(),
        Log(state),
        SampleGrid(state),
        Checkpointing(state, checkpoints),
    ]
    return state, batches, stack.enter_context(Callbacks(callbacks))


def _open_data(config: RunConfig, world: World) -> LatentReader:
    """Open the shards on every rank and check that the model is made for them."""
    if not config.data.path:
        raise ConfigError("--data.path is missing: the folder that `fastdiff encode` wrote")
    reader, error = attempt(lambda: LatentReader(config.data.path))
    world.agree(error)
    assert reader is not None
    model, shape, classes = config.model, reader.info.latent.shape, reader.info.classes
    if shape != (model.channels, model.size, model.size):
        remedy = f"--model.channels {shape[0]} --model.size {shape[1]}" if shape[1] == shape[2] else "square latents"
        raise ConfigError(
            f"{config.data.path} holds latents of shape {tuple(shape)}, the model takes "
            f"{(model.channels, model.size, model.size)}; use {remedy}"
        )
    if classes is not None and classes > model.classes:
        raise ConfigError(f"{config.data.path} has {classes} classes, the model {model.classes}; use --model.classes")
    return reader


def _claim(folder: Path, stack: ExitStack) -> None:
    stack.callback(claim(folder))


def _saved(checkpoints: Checkpoints, launch: Launch, facts: dict[str, Any], folder: Path) -> Saved | None:
    saved = checkpoints.newest() if launch.resume != "never" else None
    if launch.resume == "must" and saved is None:
        raise ConfigError(f"--resume must: {folder} has no checkpoint; use --resume auto to start a new run")
    if launch.resume == "never" and (folder / "run.json").exists():
        raise ConfigError(f"--resume never: {folder} holds a run already; delete it or choose another --output.folder")
    if saved is not None:
        check_unchanged(saved, facts, launch.allow_change)
    return saved


def _build_model(config: RunConfig, world: World, saved: Saved | None) -> DiT:
    recompute = config.performance.recompute
    if saved is None:
        model = build_model(config.model, recompute=recompute, seed=config.seed)
    else:  # before DeepSpeed casts and shards it: so the working copies are those of the restored master weights
        model = load_model(config.model, saved.weights(), recompute=recompute)
    compiled = config.performance.compile
    if compiled or (compiled is None and world.device.type == "cuda"):
        compile_blocks(model)
    return model


def _open_batches(state: TrainState) -> Batches:
    config, world = state.config, state.world
    return build_batches(
        state.reader,
        state.order,
        config=config.data,
        device=world.device,
        start_samples=state.progress.samples,
        rank=world.rank,
        ranks=world.size,
        micro=config.batch.per_rank(world.size),
        global_batch=config.batch.samples,
        on_cuda=world.device.type == "cuda",
    )
