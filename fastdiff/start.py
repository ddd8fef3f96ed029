"""From a configuration to a run in memory: every part is built, checked against the others and restored."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

import torch
from tqdm import tqdm

from fastdiff import backends, deepspeed_config, resume
from fastdiff.callbacks import Callback, Callbacks, Checkpointing, Log, NonFiniteGuard, SampleGrid
from fastdiff.checkpoint import Checkpoints, restore
from fastdiff.config import RunConfig
from fastdiff.data import build_batches, loader_name
from fastdiff.data.batches import Batches
from fastdiff.data.order import Order
from fastdiff.data.reader import LatentReader
from fastdiff.dist import World, attempt
from fastdiff.ema import Ema
from fastdiff.engine import Engine
from fastdiff.errors import ConfigError
from fastdiff.launch import Launch, as_json, claim, versions, write_run_json
from fastdiff.metrics import Meters
from fastdiff.models import build_model, load_model
from fastdiff.models.dit import DiT, DiTBlock, compile_blocks
from fastdiff.progress import Progress
from fastdiff.saved import Saved
from fastdiff.state import TrainState
from fastdiff_kernels import dispatch


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
    loader_name(config.data)  # refuses a missing loader before anything is built
    chosen = _choose_backends(config, ds_config, world)
    stack.enter_context(dispatch.forced(**config.performance.kernel_backends()))
    reader = stack.enter_context(_open_data(config, world))
    order = Order(config.seed, reader.shard_sizes, config.data.shuffle_shards)
    folder = Path(config.output.folder)
    world.on_first(lambda: _claim(folder, stack))
    facts = {
        "config": as_json(config),
        "dataset": reader.info.digest,
        "classes": reader.info.classes,
        "versions": versions(),
    }
    checkpoints = Checkpoints(folder / "checkpoints", config.output.keep, world)
    saved = resume.find(checkpoints, launch, facts, folder)

    model = _build_model(config, world, saved)
    engine = Engine(model, config, ds_config, world, blocks=[DiTBlock])
    ema, meters = Ema(engine.flats, config.ema.rates), Meters(world)
    state = TrainState(config, world, engine, ema, meters, reader, order, facts, Progress())
    if saved is not None:
        state.progress = restore(saved, state)
    batches = stack.enter_context(_open_batches(state))
    if world.is_first:
        tqdm.write(_summary(state, batches, chosen))
    device_name = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    world.on_first(lambda: write_run_json(folder, config, launch, ds_config, device_name))
    # The checkpoint before the grid: a failure while drawing must not cost the steps since the last one.
    callbacks: list[Callback] = [
        NonFiniteGuard(state),
        Log(state),
        Checkpointing(state, checkpoints),
        SampleGrid(state),
    ]
    for callback in callbacks:
        stack.callback(callback.close)
    return state, batches, Callbacks(callbacks)


def _open_data(config: RunConfig, world: World) -> LatentReader:
    """Open the shards on every rank and check that the model is made for them."""
    if not config.data.path:
        raise ConfigError("--data.path is missing: the folder that `fastdiff encode` wrote")
    # One window of shards is read at a time, and two at its border.
    open_shards = 2 * config.data.shuffle_shards
    reader, error = attempt(lambda: LatentReader(config.data.path, open_shards=open_shards))
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


def _choose_backends(config: RunConfig, ds_config: deepspeed_config.DsConfig, world: World) -> str:
    """Say what computes each op; refuse on all ranks what is forced and cannot run on one of them."""
    optimizer_device = torch.device("cpu") if deepspeed_config.offloads_optimizer(ds_config) else world.device
    chosen, error = attempt(lambda: backends.choices(config, world.device, optimizer_device=optimizer_device))
    world.agree(error)
    return backends.in_words(chosen or ())


def _claim(folder: Path, stack: ExitStack) -> None:
    stack.callback(claim(folder))


def _build_model(config: RunConfig, world: World, saved: Saved | None) -> DiT:
    recompute, attention = config.performance.recompute, config.performance.attention
    if saved is None:
        model = build_model(config.model, recompute=recompute, attention=attention, seed=config.seed)
    else:  # before DeepSpeed casts and shards it: so the working copies are those of the restored master weights
        try:
            model = load_model(config.model, saved.weights(), recompute=recompute, attention=attention)
        except RuntimeError as error:
            raise ConfigError(f"{saved.folder} holds another model: {error}") from None
    if backends.compiles(config, world.device):
        compile_blocks(model)
    return model


def _summary(state: TrainState, batches: Batches, chosen: str) -> str:
    """Say what runs, above all what was chosen automatically."""
    config, world, engine = state.config, state.world, state.engine
    parameters = sum(math.prod(shape) for shape in engine.shapes.values())
    micro, accumulation = config.batch.per_rank(world.size), config.batch.accumulation(world.size)
    parts = [
        f"{parameters / 1e6:.2f} M parameters",
        f"{world.size} ranks x {micro} samples x {accumulation} micro-batches on {world.device.type}",
        f"ZeRO-{engine.stage}, {config.performance.precision}, {config.optim.name}",
        f"loader {batches.name}, blocks {'compiled' if backends.compiles(config, world.device) else 'eager'}",
        chosen,
    ]
    if state.progress.steps:
        parts.insert(0, f"resuming from step {state.progress.steps}")
    elif (state.folder / "run.json").exists():
        parts.insert(0, "starting anew, the run that is here has no checkpoint")
    return f"{state.folder}: {'; '.join(parts)}"


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
    )
