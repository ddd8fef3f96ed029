"""From a configuration to a run in memory: every part is built, checked against the others and restored."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fastdiff.checkpoint.async_saves import AsyncSaves
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json, claim, versions, write_run_json
from fastdiff.console import log
from fastdiff.data.loading.batches import Batches
from fastdiff.data.loading.build import build_batches, build_order, loader_name
from fastdiff.data.loading.order import SampleOrder
from fastdiff.data.loading.training_set import Data, check_provenance, null_condition, open_data
from fastdiff.diffusion.objective import Objective
from fastdiff.errors import ConfigError
from fastdiff.models import kernel_choice, load
from fastdiff.models.build import Model
from fastdiff.parallel.consensus import Consensus
from fastdiff.parallel.heartbeat import Heartbeat
from fastdiff.parallel.preemption import StopRequest
from fastdiff.parallel.world import World, attempt
from fastdiff.progress import Progress
from fastdiff.training import resume
from fastdiff.training.callbacks import trackers as tracker_module
from fastdiff.training.callbacks.base import Callback, Callbacks, Preempt
from fastdiff.training.callbacks.damaged_samples import DamagedSamples
from fastdiff.training.callbacks.divergence import NonFiniteGuard, Rewind, SpikeGuard
from fastdiff.training.callbacks.log import Log
from fastdiff.training.callbacks.previews import PromptImages, SampleGrid
from fastdiff.training.callbacks.saving import Checkpointing, Snapshots
from fastdiff.training.callbacks.trackers import Trackers
from fastdiff.training.callbacks.validation import ValidationLoss
from fastdiff.training.checkpoints import Checkpoints, restore
from fastdiff.training.ema import Ema
from fastdiff.training.engine import Engine, wait_for_builds
from fastdiff.training.metrics import Meters
from fastdiff.training.resume import continue_from
from fastdiff.training.spikes import Spikes
from fastdiff.training.state import TrainState
from fastdiff_kernels import dispatch


def build(
    config: RunConfig,
    launch: Launch,
    world: World,
    stack: ExitStack,
    stop: StopRequest | None = None,
    rewind: Rewind | None = None,
    held: ExitStack | None = None,
) -> tuple[TrainState, Batches, Callbacks]:
    """Build the run, or restore it from its newest intact checkpoint; called by all ranks.

    Args:
        config: what to train.
        launch: the DeepSpeed JSON, and how to treat a run that is in the folder already.
        world: the ranks.
        stack: closes what is opened here.
        stop: requests to save and end, which reach this rank.
        rewind: start behind a spike, from the newest checkpoint before it; the folder is claimed.
        held: keeps the folder claimed; None: ``stack`` does.

    Raises:
        FastdiffError: a part does not fit the others, the folder is in use, or the data are damaged.
    """
    config = world.on_first(lambda: _resolve(config))
    ds_config = deepspeed_config.resolve(launch.deepspeed, config, world.size)
    loader_name(config.data)  # refuses a missing loader before anything is built
    world.on_first(lambda: tracker_module.require_installed(config.output.report_to))
    chosen = _choose_backends(config, ds_config, world)
    stack.enter_context(dispatch.forced(**config.performance.kernel_backends()))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.performance.allow_tf32
    world.agree(attempt(wait_for_builds)[1])
    reader, order = _open_data(config, world, stack)
    folder = Path(config.output.folder)
    if rewind is None:
        world.on_first(lambda: _claim(folder, held or stack))
    heart, error = attempt(lambda: Heartbeat(folder, world.rank, launch.hang_timeout_s))
    world.agree(error)
    assert heart is not None
    stack.callback(heart.close)
    facts = _facts(config, reader, world)
    background = stack.enter_context(AsyncSaves(world, config.output.failed_saves, heart.again))
    checkpoints = Checkpoints(folder / "checkpoints", config.output.keep, background.world)
    saved = resume.find(checkpoints, launch, facts, folder) if rewind is None else rewind.find(checkpoints)

    # The restored weights before DeepSpeed casts and shards them: so the working copies are those of the masters.
    model, error = attempt(lambda: _build_model(config, world, saved))
    world.agree(error)
    assert model is not None
    engine = Engine(model, config, ds_config, world, blocks=model.block_classes)
    state = TrainState(
        config=config,
        world=world,
        engine=engine,
        objective=_build_objective(config, reader, model, world),
        ema=Ema(engine.flats, config.ema.rates, power_stds=config.ema.power_stds, warmup=config.ema.warmup),
        meters=Meters(world),
        reader=reader,
        order=order,
        facts=facts,
        progress=Progress(),
        votes=Consensus(world, stop),
        heart=heart,
        spikes=Spikes(config.divergence, config.batch.samples, world),
    )
    if saved is not None:
        state.progress = restore(saved, state)
    elif config.pretrained.training:
        state.progress = _go_on(state)
    if rewind is not None:
        rewind.go_behind(state)
        checkpoints.save(state)  # so that a kill does not repeat it
    batches = stack.enter_context(_open_batches(state))
    if world.is_first:
        log.info(_summary(state, batches, chosen))
    device_name = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    world.on_first(lambda: write_run_json(folder, config, launch, ds_config, device_name))
    callbacks = _callbacks(state, checkpoints, background, stack.enter_context(Trackers(state)))
    for callback in callbacks:
        stack.callback(callback.close)
    return state, batches, Callbacks(callbacks)


def _go_on(state: TrainState) -> Progress:
    progress, error = attempt(lambda: continue_from(Path(state.config.pretrained.path), state))
    state.world.agree(error)
    assert progress is not None
    return progress


def _open_data(config: RunConfig, world: World, stack: ExitStack) -> tuple[Data, SampleOrder]:
    reader, error = attempt(lambda: open_data(config, world.device))
    world.agree(error)
    assert reader is not None
    stack.enter_context(reader)
    world.on_first(lambda: check_provenance(config, reader.info))
    order = build_order(
        reader.info, seed=config.seed, window_shards=config.data.shuffle_shards, global_batch=config.batch.samples
    )
    return reader, order


def _facts(config: RunConfig, reader: Data, world: World) -> dict[str, Any]:
    return {
        "config": as_json(config),
        "dataset": reader.info.digest,
        "classes": reader.info.classes,
        "base": world.on_first(lambda: load.base_digest(config)),
        "versions": versions(),
    }


def _build_objective(config: RunConfig, reader: Data, model: Model, world: World) -> Objective:
    return Objective(
        config.objective,
        seed=config.seed,
        null=null_condition(config, reader),
        device=world.device,
        inputs=model.inputs,
        posterior=reader.info.kind == "posterior",
        dtype=kernel_choice.DTYPES[config.performance.precision],
        timesteps=config.timesteps,
        batch_samples=config.batch.samples,
        low_res_size=model.low_res_size,
    )


def _callbacks(state: TrainState, checkpoints: Checkpoints, background: AsyncSaves, boards: Trackers) -> list[Callback]:
    """The checkpoint before the validations: a failure in one must not cost the steps since the last one."""
    found: list[Callback] = [NonFiniteGuard(state), Log(state, boards)]
    if state.config.data.damaged == "skip":
        found.append(DamagedSamples(state))
    found.append(SpikeGuard(state))  # behind what is to be recorded also of a step that is undone
    checkpointing = Checkpointing(state, checkpoints, background)
    found += [Snapshots(state, background), checkpointing, Preempt()]
    if state.config.validation.data:
        found.append(ValidationLoss(state, boards))
    if state.config.model.kind != "unet":
        found.append(SampleGrid(state))
    elif state.config.validation.prompts and state.config.validation.every:
        found.append(PromptImages(state, boards))
    return found


def _resolve(config: RunConfig) -> RunConfig:
    """Fill in what the pretrained pipeline decides, and download it: one rank does, the others find it in the cache."""
    resolved = load.resolve(config)
    load.download(resolved)
    return resolved


def _choose_backends(config: RunConfig, ds_config: deepspeed_config.DsConfig, world: World) -> str:
    """Say what computes each op; refuse on all ranks what is forced and cannot run on one of them."""
    optimizer_device = torch.device("cpu") if deepspeed_config.offloads_optimizer(ds_config) else world.device
    chosen, error = attempt(lambda: kernel_choice.choices(config, world.device, optimizer_device=optimizer_device))
    world.agree(error)
    return kernel_choice.in_words(chosen or ())


def _claim(folder: Path, stack: ExitStack) -> None:
    stack.callback(claim(folder))


def _build_model(config: RunConfig, world: World, saved: Checkpoint | None) -> Model:
    try:
        model = load.build_network(config, None if saved is None else saved.weights())
    except ConfigError as error:
        raise error if saved is None else ConfigError(f"{saved.folder}: {error}") from None
    if kernel_choice.compiles(config, world.device):
        model.compile_blocks()
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
        f"loader {batches.name}, blocks {'compiled' if kernel_choice.compiles(config, world.device) else 'eager'}",
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
        seed=config.seed,
        device=world.device,
        start_samples=state.progress.samples,
        rank=world.rank,
        ranks=world.size,
        micro=config.batch.per_rank(world.size),
        global_batch=config.batch.samples,
    )
