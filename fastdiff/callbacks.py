"""Everything periodic: the log, sample grids and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from fastdiff.batch import Condition
from fastdiff.boards import Boards
from fastdiff.dist import attempt
from fastdiff.errors import ConfigError, Preempted
from fastdiff.flops import peak_flops, training_flops
from fastdiff.fragments import Room, assemble
from fastdiff.grid import image_grid
from fastdiff.metrics import BY_LEVEL, JsonLines, Record, drop_records_after, peak_gib
from fastdiff.model_config import UNetConfig
from fastdiff.models import Model
from fastdiff.network import build_network
from fastdiff.progress import Every
from fastdiff.sample_pixels import may_be_pixels
from fastdiff.sampling import grid_classes, sample
from fastdiff.state import TrainState


class Callback:
    """Something that is called after every optimizer step, and once at the end of a run that ended well."""

    def on_step(self, state: TrainState) -> None:
        """Act after a step, if due. Reads from the device only then."""

    def on_end(self, state: TrainState) -> None:
        """Act at the end."""

    def on_preempted(self, state: TrainState) -> None:
        """Act when the run is asked to stop."""

    def close(self) -> None:
        """Release files; called on every way out."""


class Callbacks:
    """All callbacks of a run, in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def on_step(self, state: TrainState) -> None:
        """Call every callback, off the clock of the step times."""
        with state.meters.off_the_clock():
            for callback in self._callbacks:
                callback.on_step(state)

    def on_end(self, state: TrainState) -> None:
        """Call every callback's ``on_end``."""
        for callback in self._callbacks:
            callback.on_end(state)

    def on_preempted(self, state: TrainState) -> None:
        """Call every callback's ``on_preempted``."""
        for callback in self._callbacks:
            callback.on_preempted(state)


class Log(Callback):
    """Progress bar, ``metrics.jsonl`` and the boards, on rank 0."""

    def __init__(self, state: TrainState, boards: Boards) -> None:
        self._boards = boards
        self._every = Every(state.config.output.log_every)
        self._is_first = state.world.is_first
        self._flops = _flops(state)
        self._peak = peak_flops(torch.cuda.get_device_name()) if state.world.device.type == "cuda" else None
        if not self._is_first:
            return
        drop_records_after(state.folder / "metrics.jsonl", state.progress.steps)
        self._lines = JsonLines(state.folder / "metrics.jsonl")
        self._bar = tqdm(
            total=state.config.samples,
            initial=state.progress.samples,
            unit="sample",
            unit_scale=True,
            desc=state.folder.name,
            mininterval=1.0,
            dynamic_ncols=True,
        )

    def on_step(self, state: TrainState) -> None:
        """Advance the bar; write a record when due."""
        if self._is_first:
            self._bar.update(state.config.batch.samples)
        if not self._every.due(state.progress) and state.progress.samples < state.config.samples:
            return
        record = self._record(state)
        if self._is_first:
            self._lines.write(record)
            numbers = {_on_boards(name): value for name, value in record.items() if isinstance(value, float)}
            self._boards.scalars(numbers, state.progress.steps)
            self._bar.set_postfix(loss=f"{record['loss']:.4f}", lr=f"{record['lr']:.2e}")

    def _record(self, state: TrainState) -> Record:
        read = state.meters.read()
        rate = 1e3 * state.config.batch.samples / read["step_ms"]
        norm = state.engine.grad_norm()
        mfu = rate * self._flops / (self._peak * state.world.size) if self._peak else None
        return {
            "step": state.progress.steps,
            "samples": state.progress.samples,
            "loss": read["loss"],
            "lr": state.engine.lr,
            "grad_norm": None if norm is None else float(norm),
            "samples_per_s": rate,
            "step_ms": read["step_ms"],
            "data_wait_ms": read["data_wait_ms"],
            "peak_gib": peak_gib(state.world.device),
            "mfu": mfu,
            "skipped": state.progress.skipped,
            **{name: read[name] for name in BY_LEVEL},
        }

    def close(self) -> None:
        """Close the file and leave the bar as it stands."""
        if self._is_first:
            self._bar.close()
            with suppress(OSError):  # what could not be written has been reported when it was tried
                self._lines.close()


def _on_boards(name: str) -> str:
    """What boards call a number: the losses by noise level stand together, in two sections."""
    section = "log_snr/" if name.startswith("loss_snr_") else "depth/" if name in BY_LEVEL else ""
    return section + name


def _flops(state: TrainState) -> float:
    """Operations of a training step per sample, on average over the sizes of the latents."""
    config, info = state.config, state.reader.info
    total = 0.0
    for shard in info.shards:
        height, width = info.buckets[shard.bucket] if info.buckets else info.latent.shape[1:]
        model = config.model
        if isinstance(model, UNetConfig):
            side = model.smallest_factor * max(1, round(math.sqrt(height * width) / model.smallest_factor))
            model = replace(model, size=side)
        step = training_flops(model, adapter=config.lora.rank > 0, dream=config.objective.dream)
        total += step * shard.samples / info.samples
    return total


class SampleGrid(Callback):
    """Draws a grid of images with the averaged weights: one column per class, on all ranks together."""

    rows = 8

    def __init__(self, state: TrainState) -> None:
        self._every = Every(state.config.output.sample_every)
        self._drawn = -1

    def on_step(self, state: TrainState) -> None:
        """Draw ``samples/step-N.png`` when due."""
        if self._every.due(state.progress):
            self._draw(state)

    def on_end(self, state: TrainState) -> None:
        """Draw the last grid."""
        if self._every.steps > 0 and self._drawn != state.progress.steps:
            self._draw(state)

    def _draw(self, state: TrainState) -> None:
        self._drawn = state.progress.steps
        config = state.config
        assert not isinstance(config.model, UNetConfig)
        classes = state.reader.info.classes if config.model.classes else None
        labels = grid_classes(config.model, classes).repeat(self.rows)
        images = draw_together(
            state,
            averaged_model(state),
            {"label": labels},
            null=state.objective.null,
            shape=(config.model.channels, config.model.size, config.model.size),
            steps=config.output.sample_steps,
            # What was never trained without a class is not guided away from it.
            cfg=config.output.sample_cfg if classes and config.objective.condition_dropout else None,
            clip=may_be_pixels(state.reader.info.provenance.autoencoder, config.model.channels),
        )
        if state.world.is_first:
            folder = state.folder / "samples"
            folder.mkdir(exist_ok=True)
            image_grid(images.cpu(), rows=self.rows).save(folder / f"step-{state.progress.steps:08d}.png")


def draw_together(
    state: TrainState,
    model: Model,
    condition: Condition,
    *,
    null: Condition,
    shape: tuple[int, int, int],
    steps: int,
    cfg: float | None,
    clip: bool,
    batch: int = 256,
) -> Tensor:
    """Draw one image per entry of ``condition`` (``[N, ...]`` each), every rank its share; called by all ranks.

    The options are those of ``fastdiff.sampling.sample``.

    Returns:
        ``[N, *shape]`` fp32 latents, on every rank's device.

    Raises:
        FastdiffError: on every rank, if one of them fails.
    """
    world, count = state.world, next(len(value) for value in condition.values())
    share = -(-count // world.size)
    mine = slice(world.rank * share, (world.rank + 1) * share)
    images = torch.zeros(count, *shape, device=world.device)
    chosen = {name: value[mine].to(world.device) for name, value in condition.items()}

    def draw() -> None:
        with memory_beside_training(world.device):
            images[mine] = sample(
                model,
                state.config.objective,
                chosen,
                shape=shape,
                null=null,
                scheduler="dpmsolver++",
                steps=steps,
                shift=state.config.timesteps.shift,
                cfg=cfg,
                clip=clip,
                seed=state.config.seed,
                batch=batch,
                first_index=mine.start,
            )

    world.agree(attempt(draw)[1])
    return world.sum_(images)


@contextmanager
def memory_beside_training(device: torch.device) -> Iterator[None]:
    """Say what to do if the averaged model, or what is done with it, does not fit beside the training."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory left on {device} for the averaged model beside the training ({str(error).splitlines()[0]}); "
            "leave it more room with more ranks, a higher ZeRO stage or offloading (--deepspeed_config), for images of "
            "prompts also with a lower --batch.micro (the batches of the losses are fixed), or do without, with "
            "--validation.every 0 and --output.sample_every 0. The checkpoints are intact"
        ) from None


def averaged_model(state: TrainState, dtype: torch.dtype = torch.float32) -> Model:
    """Return a plain copy of the model with the first EMA's weights, or the weights themselves if there is none.

    Called by all ranks; each gets the whole model, on its device.

    Raises:
        FastdiffError: on every rank, if one of them fails.
    """
    flats = state.engine.flats
    averages = next(iter(state.ema.averages.values()), [flat.master for flat in flats])
    shapes, device = state.engine.shapes, state.world.device

    def reserve() -> Room:
        with memory_beside_training(device):
            return Room.reserve(shapes, dtype, device)

    # Before the ranks add up: one that ran out of memory there would leave the others waiting for it.
    room, error = attempt(reserve)
    state.world.agree(error)
    weights = assemble(state.world, flats, averages, shapes, room)

    def build() -> Model:
        with memory_beside_training(device):
            return build_network(state.config, weights).to(device, dtype).eval()

    model, error = attempt(build)
    state.world.agree(error)
    assert model is not None

    def before_forward(*_: object) -> None:
        state.heart.again()  # a validation may take longer than a rank may be silent
        if state.votes.reason is not None:
            raise _preempted(state.votes.reason, state)  # which the ranks agree on, like any error in a validation

    model.register_forward_pre_hook(before_forward)
    return model


class Preempt(Callback):
    """Ends the run when any rank was asked to stop (``preemption``)."""

    def on_step(self, state: TrainState) -> None:
        """Raise if the ranks voted so.

        Raises:
            Preempted: on every rank, after the same step.
        """
        if state.tally.stop:
            reason = next(reason for reason in state.world.gather(state.votes.reason) if reason is not None)
            raise _preempted(reason, state)


def _preempted(reason: str, state: TrainState) -> Preempted:
    return Preempted(f"{reason}: saved step {state.progress.steps}; the same command goes on from there")
