"""The first lines of a run, with its choices for this machine, and its record; the last lines of a complete run."""

import math
import shlex
from datetime import datetime, timedelta

import torch

from fastdiff.conditions import REFERENCE, of_source
from fastdiff.config.launch_options import Launch
from fastdiff.config.networks.pretrained import LoraConfig
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.user_defined import file_of
from fastdiff.config.run_record import run_json
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.console import log
from fastdiff.data.joined.info import JoinedInfo
from fastdiff.data.loading.batches import Batches
from fastdiff.data.loading.build import choose_loader
from fastdiff.models import kernel_choice
from fastdiff.models.adapter_kinds.kinds import kind_of
from fastdiff.models.family import family_of
from fastdiff.plurals import counted
from fastdiff.training.state import TrainState


def announce(state: TrainState, launch: Launch, batches: Batches, chosen: str) -> None:
    """Log the first line of a run, and record the run in its folder."""
    if state.world.is_first:
        log.info(summary(state, batches, chosen))
        model, path = state.config.model, state.config.data.described
        if of_source("caption", state.reader.info.columns) and not model.text_conditional:
            log.warning(f"the captions of {path} are not read: {model.title} takes none; a PixArt does, for example")
        if REFERENCE in state.reader.info.columns and not model.references:
            log.warning(f"the references of {path} are not read: {model.title} takes none; a Flux.2 does, for example")
    record(state, launch)


def record(state: TrainState, launch: Launch) -> None:
    """Write ``run.json``; called by all ranks."""
    device = torch.cuda.get_device_name() if state.world.device.type == "cuda" else "cpu"
    content = run_json(state.config, launch, state.engine.ds_config, device, state.metadata)
    state.world.on_rank0(lambda: state.files.write(state.folder / "run.json", content, durable=False))


def summary(state: TrainState, batches: Batches, chosen: str) -> str:
    """Summarize the run, above all the automatic choices."""
    config, world, engine = state.config, state.world, state.engine
    network = _counted_network(config.model, config.lora, sum(math.prod(shape) for shape in engine.shapes.values()))
    micro, accumulation = config.batch.per_rank(world.size), config.batch.accumulation(world.size)
    info = state.reader.info
    images, unit = (info.epoch, "samples") if isinstance(info, JoinedInfo) else (info.samples, "images")
    begin = ""
    if state.progress.steps:
        begin = f"resuming from step {state.progress.steps}; "
    elif (state.folder / "run.json").exists():
        begin = "starting anew, the run that is here has no checkpoint; "
    lines = [
        f"{state.folder}: {begin}{network}, {config.steps:,} steps "
        f"of {config.batch.samples:,} samples = {config.samples / images:,.1f} epochs of {images:,} {unit}",
        *(info.lines(mirrors=config.data.random_flip) if isinstance(info, JoinedInfo) else []),
        f"on {world.device.type}: {counted(world.size, 'rank')} x {counted(micro, 'sample')} x "
        f"{counted(accumulation, 'micro-batch', 'es')}, "
        f"ZeRO-{engine.stage}, {_precision(config.performance)}{_tf32(world.device)}, {config.optim.name}",
        f"loader {batches.name}{_why_not_dali(config.data, batches, world.device)}, "
        f"blocks {'compiled' if kernel_choice.compiles(config.performance, world.device) else 'eager'}; {chosen}",
    ]
    return "\n  ".join(lines)


def _counted_network(network: ModelConfig, lora: LoraConfig, trained: int) -> str:
    """Name what is trained, with the number of its parameters."""
    parameters = f"{trained / 1e6:.2f} M parameters"
    if lora.rank:
        return f"a {kind_of(lora).title} of {kind_of(lora).size(lora)}, {parameters}, of {network.title}"
    return f"{network.title} of {parameters}"


def closing(state: TrainState, loss: float | None) -> str:
    """Return the last lines of a complete run.

    Args:
        state: at its end.
        loss: mean since the line of the log before; None: this start had nothing to train.
    """
    folder, model = state.folder, state.config.model
    told = "" if loss is None else f", loss {loss:.4f}"
    samples = folder / "samples"
    pictures = f", pictures in {samples}" if samples.is_dir() else ""
    lines = [
        f"{folder}: done, {state.progress.steps:,} steps{told}",
        f"checkpoint in {folder / 'checkpoints'}{pictures}",
        "next:",
    ]
    condition = ["--prompt", "TEXT"] if model.text_conditional else []
    picture = ["--grid", f"{folder.name}.png"]
    if model.low_res_size:
        picture = ["--npz", f"{folder.name}.npz", "--low-res", "SMALL.npz"]
    family = family_of(model)
    whole = "safetensors" if family.options(model) else family.script_format
    forms = family.adapter_formats if state.config.lora.rank else (whole,)
    own = file_of(model.kind)
    code = ["--plugin", own.text] if own is not None else []
    lines.append(f"  {shlex.join(['fastdiff', 'sample', str(folder), *code, *condition, *picture])}")
    for form in forms:
        exported = ["fastdiff", "export", str(folder), f"{folder.name}-{form}", "--format", form, *code]
        lines.append(f"  {shlex.join(exported)}")
    return "\n  ".join(lines)


def time_left(samples: int, samples_per_s: float, now: datetime) -> str:
    """Return how long ``samples`` will take, and when they end."""
    seconds = round(samples / samples_per_s)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    span = f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds % 60:02d} s"
    return f"about {span} to go, until {now + timedelta(seconds=seconds):%a %d %b %H:%M}"


def _tf32(device: torch.device) -> str:
    """Say whether fp32 matrix products and convolutions round their inputs to TF32; a CPU has none."""
    if device.type != "cuda":
        return ""
    return f", TF32 {'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'}"


def _why_not_dali(data: DataConfig, batches: Batches, device: torch.device) -> str:
    if batches.name != "prefetch" or data.loader != "auto":
        return ""
    return f" ({choose_loader(data, device)[1]})"


def _precision(performance: PerformanceConfig) -> str:
    precision, sums = performance.precision, performance.sums
    return precision if precision == "fp32" else f"{precision} with gradients added up in {sums}"
