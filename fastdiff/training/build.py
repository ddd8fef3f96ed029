"""Construction of a run from its configuration: every part is built, checked against the others and restored."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastdiff.buffered_writes import WholeFiles
from fastdiff.checkpoint.async_saves import ANY_NUMBER, AsyncSaves
from fastdiff.checkpoint.reader import Checkpoint
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config import engine as engines
from fastdiff.config.cuda_graph import Circumstances, require_static
from fastdiff.config.launch_options import Launch
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json, claim, plugins, versions
from fastdiff.config.trackers import require_usable
from fastdiff.console import log
from fastdiff.data.joined.info import JoinedInfo
from fastdiff.data.joined.reading import paths_of
from fastdiff.data.loading.batches import Batches
from fastdiff.data.loading.build import build_batches, build_order, choose_loader
from fastdiff.data.loading.fit import trains_masked
from fastdiff.data.loading.order import SampleOrder
from fastdiff.data.loading.training_set import (
    Data,
    check_provenance,
    described_selection,
    null_condition,
    open_data,
    set_dropouts,
    with_autoencoder,
    with_captions,
    with_references,
)
from fastdiff.data.shards.usage import note_use
from fastdiff.diffusion.objective import Objective
from fastdiff.diffusion.routing import TokenRouting
from fastdiff.json_lines import JsonLines, last_record
from fastdiff.ledger.records import open_ledger
from fastdiff.ledger.writer import Ledger
from fastdiff.models import kernel_choice, load, toolchain
from fastdiff.models.build import Model
from fastdiff.parallel.consensus import Consensus
from fastdiff.parallel.determinism import deterministic
from fastdiff.parallel.devices import require_precision
from fastdiff.parallel.heartbeat import Heartbeat
from fastdiff.parallel.preemption import StopRequest
from fastdiff.parallel.world import World
from fastdiff.progress import Progress
from fastdiff.sampling.latent_statistics import manifest_of
from fastdiff.starting import starting
from fastdiff.training import resume
from fastdiff.training.callbacks.base import Callback, Callbacks
from fastdiff.training.callbacks.build import build_callbacks
from fastdiff.training.callbacks.divergence import Rewind
from fastdiff.training.callbacks.log import planned
from fastdiff.training.callbacks.saving import CHECKPOINT, save_checkpoint
from fastdiff.training.callbacks.summary import announce
from fastdiff.training.checkpoints import Checkpoints, restore, return_to
from fastdiff.training.compiled_code import compiled_code
from fastdiff.training.ema import Ema
from fastdiff.training.forward_backward.build import build_forward_backward
from fastdiff.training.guard import StepGuard
from fastdiff.training.memory import smaller_batch
from fastdiff.training.memory.explanation import explaining_construction
from fastdiff.training.memory.micro_batch import with_micro
from fastdiff.training.metrics import Meters
from fastdiff.training.network import build_engine
from fastdiff.training.plugins.network import check_network
from fastdiff.training.plugins.objective import open_loss
from fastdiff.training.rehearsal import rehearse
from fastdiff.training.resume import continue_from
from fastdiff.training.spikes import Spikes
from fastdiff.training.state import TrainState
from fastdiff.training.statistics.inputs import InputStatistics
from fastdiff.training.trackers.build import Trackers
from fastdiff_kernels import dispatch

if TYPE_CHECKING:
    from fastdiff.planning.figures import Figures


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts that precede the model and live as long as the run, through every rewind."""

    config: RunConfig
    launch: Launch
    ds_config: deepspeed_config.DsConfig
    world: World
    ops: str
    """Backend of each op, in words; empty until the checkpoint is known, whose engine a resumed run keeps."""
    reader: Data
    order: SampleOrder
    folder: Path
    heartbeat: Heartbeat
    ledger: Ledger
    files: WholeFiles
    metadata: dict[str, Any]
    background: AsyncSaves
    checkpoints: Checkpoints
    keep_code: Callback


class Run:
    """A run in memory: its state, and the batches and callbacks from its current position on."""

    batches: Batches
    callbacks: Callbacks

    def __init__(self, parts: _Parts, state: TrainState, stack: ExitStack) -> None:
        self.state = state
        self._is_open = False
        self._parts = parts
        parts.background.restored(CHECKPOINT, state.progress.steps)
        starting.enter("opening the logs")
        self._trackers = stack.enter_context(Trackers(state))
        self._opened = stack.enter_context(ExitStack())
        self._open()

    def go_back(self, rewind: Rewind) -> None:
        """Rewind to the newest intact checkpoint before a spike, and continue after the spike; called by all ranks.

        The result equals a process started from that checkpoint, but nothing is built again. FastdiffError: there is no
        such checkpoint, it cannot be read, or the state after the spike cannot be saved.
        """
        state, parts = self.state, self._parts
        state.heartbeat.beat(state.progress.steps, "start")
        self.callbacks.on_rewind(state)
        self._opened.close()
        self.callbacks = Callbacks([])  # the step of the spike must not be saved
        parts.background.wait_for_all(ANY_NUMBER)
        state.progress = return_to(rewind.find(parts.checkpoints), state)
        rewind.go_behind(state)
        save_checkpoint(state, parts.checkpoints, parts.background)  # so that a kill does not repeat the rewind
        self._open()

    def _open(self) -> None:
        """Open the parts that depend on the position of the run."""
        starting.enter("opening the loader")
        self.batches = self._opened.enter_context(_open_batches(self.state))
        if not self._is_open:  # a rewind has told of itself
            announce(self.state, self._parts.launch, self.batches, self._parts.ops)
            self._planned = planned(self.state) if self.state.world.is_first else None
        self.callbacks = _open_callbacks(self.state, self._parts, self._trackers, self._opened, self._planned)
        if not self._is_open and self.state.progress.samples < self.state.config.samples:
            starting.enter("rehearsing")
            rehearse(self.state, self.callbacks)
        self._is_open = True
        self.callbacks.on_start(self.state)


def build(config: RunConfig, launch: Launch, world: World, stack: ExitStack, stop: StopRequest | None = None) -> Run:
    """Build the run, or restore it from its newest intact checkpoint; called by all ranks.

    Args:
        config: of the run.
        launch: the DeepSpeed JSON, and how to treat an existing run in the folder.
        world: the ranks.
        stack: closes everything opened here.
        stop: requests to save and end that reach this rank.

    Raises:
        FastdiffError: a part does not fit the others, the folder is in use, or the data are damaged.
    """
    starting.enter("opening the data")
    parts = _prepare(config, launch, world, stack)
    saved = resume.find(parts.checkpoints, launch, parts.metadata, parts.folder)
    parts = _completed(parts, saved, stack)
    if saved is None:
        world.on_rank0(lambda: check_network(parts.config, world.device))
    starting.enter("building the network")
    with explaining_construction(parts.config, parts.ds_config, world, flat=_engine_of(parts, saved) == "flat"):
        state = _build_state(parts, saved, stop)
        if saved is not None:
            starting.enter("restoring the checkpoint")
        stack.callback(state.close)
        state.progress = _restore(parts, state, saved)
    parts.ledger.resume(state.progress.steps)
    if state.progress.samples > config.samples and world.is_first:
        log.warning(
            f"{parts.folder} has seen {state.progress.samples} samples, more than --samples {config.samples}: there is "
            "nothing to train; raise --samples to go on"
        )
    return Run(parts, state, stack)


def _prepare(config: RunConfig, launch: Launch, world: World, stack: ExitStack) -> _Parts:
    """Check the configuration, open the data, claim the folder."""
    world.on_all_ranks(lambda: require_precision(config.performance.precision, world.device))
    config = world.on_rank0(lambda: _resolve(config))
    ds_config = deepspeed_config.resolve(launch.deepspeed, config, world.size)
    if not config.data.online:
        # Refuses a loader that does not work before anything is built; DALI is tried on the device of each rank.
        world.on_all_ranks(lambda: choose_loader(config.data, world.device))
    world.on_rank0(lambda: require_usable(config.output.report_to))
    keep_code = stack.enter_context(compiled_code(config, world, _optimizer_device(ds_config, world)))
    stack.enter_context(deterministic(config.performance.deterministic))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.performance.allow_tf32
    folder = Path(config.output.folder)
    # A new run is refused before anything is written; one that may resume waits for its checkpoint.
    is_new = world.on_rank0(lambda: not (folder / "checkpoints").exists())
    ops = _choose_backends(config, ds_config, world, None, stack) if is_new else ""
    reader, order = _open_data(config, world, stack)
    config = world.on_rank0(lambda: with_autoencoder(with_captions(with_references(config, reader), reader), reader))
    world.on_rank0(lambda: _claim(folder, stack))
    ledger = stack.enter_context(start_ledger(folder, config.batch.samples, world))
    heartbeat = world.on_all_ranks(lambda: Heartbeat(folder, world.rank, launch.hang_timeout_s))
    stack.callback(heartbeat.close)
    files = WholeFiles(buffered=config.output.failed_saves > 0)
    stack.callback(files.close)
    background = stack.enter_context(AsyncSaves(world, config.output.failed_saves, heartbeat.again))
    return _Parts(
        config=config,
        launch=launch,
        ds_config=ds_config,
        world=world,
        ops=ops,
        reader=reader,
        order=order,
        folder=folder,
        heartbeat=heartbeat,
        ledger=ledger,
        files=files,
        metadata=_metadata(config, reader, world),
        background=background,
        checkpoints=Checkpoints(folder / "checkpoints", config.output.keep, background.world, config.output.pinned_gib),
        keep_code=keep_code,
    )


def _completed(parts: _Parts, saved: Checkpoint | None, stack: ExitStack) -> _Parts:
    """Complete the parts by what a resumed run keeps: engine, dtype of sums, micro-batch, and ZeRO-1 without a file.

    Earlier versions took ZeRO-1 on one rank, too, whose losses differ from those of ZeRO-0 by rounding.
    """
    config = resume.with_sums(parts.config, saved)
    raw = parts.launch.deepspeed
    if raw is None and saved is not None and saved.manifest.get("zero_stage") == 1:
        raw = deepspeed_config.ZERO1
    ds_config = deepspeed_config.resolve(raw, config, parts.world.size)
    ops = parts.ops or _choose_backends(config, ds_config, parts.world, saved, stack)
    config = with_micro(config, ds_config, parts.reader, saved, parts.world)
    config = smaller_batch.limited(config, ds_config, parts.world)
    ds_config = deepspeed_config.resolve(raw, config, parts.world.size)
    metadata = {**parts.metadata, "config": as_json(config)}
    return replace(parts, config=config, ds_config=ds_config, metadata=metadata, ops=ops)


def _engine_of(parts: _Parts, saved: Checkpoint | None) -> engines.Kind:
    manifest = None if saved is None else saved.manifest
    return engines.choose(parts.config.optim, parts.config.performance, parts.ds_config, manifest)


def _build_state(parts: _Parts, saved: Checkpoint | None, stop: StopRequest | None) -> TrainState:
    """Build the model with the weights of a checkpoint, the engine, and the parts that use its weights."""
    config, world = parts.config, parts.world
    model, engine = build_engine(config, parts.ds_config, world, saved)
    spikes = Spikes(config.divergence, config.batch.samples, world)
    objective = _build_objective(config, parts.reader, model, world)
    ema = Ema(engine.flats, config.ema.rates, power_stds=config.ema.power_stds, warmup=config.ema.warmup)
    engine.attach(ema)
    model.scales.attach(engine.averaged_ranks(world))
    info = parts.reader.info
    sets = {each.name: each.loss_weight for each in info.sets} if isinstance(info, JoinedInfo) else {}
    set_weights = torch.tensor([*sets.values()], device=world.device) if any(w != 1.0 for w in sets.values()) else None
    meters = Meters(world, parts.heartbeat, objective.part_names, parts.ledger, sets)
    guard = StepGuard(Consensus(world, stop), spikes, parts.heartbeat, config.batch.accumulation(world.size))
    return TrainState(
        config=config,
        world=world,
        engine=engine,
        objective=objective,
        scales=model.scales,
        ema=ema,
        meters=meters,
        reader=parts.reader,
        order=parts.order,
        metadata=parts.metadata,
        progress=Progress(),
        heartbeat=parts.heartbeat,
        guard=guard,
        forward_backward=build_forward_backward(
            config.performance, engine, objective, meters, guard, world, set_weights
        ),
        inputs=InputStatistics(objective),
        files=parts.files,
        ledger=parts.ledger,
    )


def _restore(parts: _Parts, state: TrainState, saved: Checkpoint | None) -> Progress:
    """Restore the state of a checkpoint or of a published training, or start anew."""
    if saved is not None:
        return restore(saved, state)
    pretrained = parts.config.pretrained
    if pretrained.training:
        return parts.world.on_all_ranks(lambda: continue_from(Path(pretrained.path), state))
    return Progress()


def _open_callbacks(
    state: TrainState, parts: _Parts, trackers: Trackers, stack: ExitStack, plan: Figures | None
) -> Callbacks:
    callbacks = [
        *build_callbacks(state, parts.checkpoints, parts.background, trackers, plan, parts.launch.preset),
        parts.keep_code,
    ]
    for callback in callbacks:
        stack.callback(callback.close)
    return Callbacks(callbacks)


def _open_data(config: RunConfig, world: World, stack: ExitStack) -> tuple[Data, SampleOrder]:
    reader = world.on_all_ranks(lambda: open_data(config, world.device))
    stack.enter_context(reader)
    if world.is_first and (lines := described_selection(reader)):
        log.info(lines)
    if world.is_first and trains_masked(config.objective, reader.info):
        log.info(f"{reader.folder}: its masks weight the loss; --objective.masked False leaves them out")
    world.on_rank0(lambda: check_provenance(config.pretrained, config.data, reader.info))
    world.on_rank0(lambda: _note_use(config))
    order = build_order(
        reader.info, seed=config.seed, window_shards=config.data.shuffle_shards, global_batch=config.batch.samples
    )
    sizes = len(order.buckets) or 1
    world.on_rank0(lambda: require_static(Circumstances(config=config, device=world.device.type, sizes=sizes)))
    return reader, order


def _note_use(config: RunConfig) -> None:
    for path in () if config.data.online else paths_of(config.data):
        note_use(Path(path), Path(config.output.folder))


def _metadata(config: RunConfig, reader: Data, world: World) -> dict[str, Any]:
    return {
        "config": as_json(config),
        "dataset": reader.info.digest,
        **({"datasets": reader.info.facts} if isinstance(reader.info, JoinedInfo) else {}),
        "classes": reader.info.classes,
        "class_names": list(reader.info.class_names) if config.model.classes else [],
        "base": world.on_rank0(lambda: load.base_digest(config.pretrained, config.lora)),
        "adapter": world.on_rank0(lambda: load.adapter_digest(config.lora)),
        "pretrained": load.absolute_path(config.pretrained),
        "autoencoder": reader.info.provenance.autoencoder_digest,
        **manifest_of(reader.info),
        "versions": versions() | world.on_rank0(lambda: plugins(config)) | reader.info.provenance.packages,
    }


def _build_objective(config: RunConfig, reader: Data, model: Model, world: World) -> Objective:
    own_loss = world.on_all_ranks(lambda: open_loss(config, world.device))
    return Objective(
        config.objective,
        seed=config.seed,
        null=null_condition(config, reader),
        device=world.device,
        inputs=model.inputs,
        posterior=reader.info.kind == "posterior",
        dtype=kernel_choice.DTYPES[config.performance.precision],
        timesteps=config.drawn_levels,
        batch_samples=config.batch.samples,
        low_res_size=config.model.low_res_size,
        own_loss=own_loss,
        set_dropouts=set_dropouts(config, reader),
        routing=_build_routing(config),
        aligned_token=config.model.aligned_token,
    )


def _build_routing(config: RunConfig) -> TokenRouting | None:
    route = config.model.route
    if route is None:
        return None
    return TokenRouting(route, seed=config.seed, batch_samples=config.batch.samples, dense_from=config.dense_from)


def _resolve(config: RunConfig) -> RunConfig:
    """Resolve the fields that depend on the pretrained pipeline, and download it into the cache of all ranks."""
    resolved = load.resolve(config)
    load.download(resolved.pretrained, online=resolved.data.online)
    return resolved


def _choose_backends(
    config: RunConfig, ds_config: deepspeed_config.DsConfig, world: World, saved: Checkpoint | None, stack: ExitStack
) -> str:
    """Force the backends of the run and report that of each op; fail on all ranks if one is unavailable on any."""
    manifest = None if saved is None else saved.manifest
    asked = config.optim, config.performance, ds_config, manifest
    kind = world.on_rank0(lambda: engines.choose(*asked))
    run = Circumstances(config=config, device=world.device.type, not_flat=engines.why_not_flat(*asked))
    world.on_rank0(lambda: require_static(run))
    where = _optimizer_device(ds_config, world)

    def choose() -> list[kernel_choice.Row]:
        rows = kernel_choice.choices(config, world.device, optimizer_device=where, flat=kind == "flat")
        toolchain.require_for(rows, world.device, compiled=kernel_choice.compiles(config.performance, world.device))
        return rows

    chosen = world.on_all_ranks(choose)
    stack.enter_context(
        dispatch.forced(**kernel_choice.backends(config.optim, config.performance, world.device, where))
    )
    return kernel_choice.in_words(chosen)


def _optimizer_device(ds_config: deepspeed_config.DsConfig, world: World) -> torch.device:
    return torch.device("cpu") if deepspeed_config.offloads_optimizer(ds_config) else world.device


def _claim(folder: Path, stack: ExitStack) -> None:
    stack.callback(claim(folder))


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


def start_ledger(run: Path, samples: int, world: World) -> Ledger:
    """Return the account of this process, which rank 0 writes; called by all ranks, after ``run`` is claimed."""
    nodes = world.gather(socket.gethostname())
    lines: JsonLines | None = None

    def open_lines() -> tuple[int, float] | None:
        nonlocal lines
        lines = open_ledger(run)
        return _last_logged(run / "metrics.jsonl")

    logged = world.on_rank0(open_lines)
    return Ledger(lines, nodes, samples, logged)


def _last_logged(path: Path) -> tuple[int, float] | None:
    """Return step and time of the last line of the log, before the resume cuts it back; None without a whole one."""
    try:
        last = last_record(path)
        return None if last is None else (int(last["step"]), path.stat().st_mtime)
    except (OSError, ValueError, OverflowError):
        return None
