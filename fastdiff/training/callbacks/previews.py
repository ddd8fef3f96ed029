"""Previews drawn during training with the averaged weights: a grid of classes, and what draws on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fastdiff.batch import Condition
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.console import log
from fastdiff.models.load import build_network
from fastdiff.parallel.fragments import Room, assemble
from fastdiff.plurals import counted
from fastdiff.progress import Every
from fastdiff.sampling.class_names import ClassNames
from fastdiff.sampling.guidance import with_path_drop
from fastdiff.sampling.image_grid import encoded, image_grid
from fastdiff.sampling.pixels import may_be_pixels
from fastdiff.sampling.solvers import grid_classes, sample
from fastdiff.training.callbacks.base import Callback, preempted
from fastdiff.training.callbacks.shared_base import SharedBase, shares_base
from fastdiff.training.memory.explanation import explaining_memory
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.build import Trackers

if TYPE_CHECKING:
    from PIL.Image import Image


class SampleGrid(Callback):
    """Grid of images, one column per class, drawn by all ranks with the averaged weights; the trackers show it too.

    Classes with names have them above their columns, and are shown one by one in the trackers.
    """

    account = "sampling"
    rows = 8

    def __init__(self, state: TrainState, trackers: Trackers) -> None:
        self._trackers = trackers
        self._every = Every(state.config.output.sample_every)
        self._drawn = -1

    def on_step(self, state: TrainState) -> None:
        """Draw ``samples/step-N.png`` when due."""
        if self._every.due(state.progress):
            self._draw(state)

    def rehearse(self, state: TrainState) -> None:
        """Draw with a single denoising step, and keep nothing."""
        if self._every.steps > 0:
            self._drawn_images(state, steps=1)

    def on_end(self, state: TrainState) -> None:
        """Draw the last grid."""
        if self._every.steps > 0 and self._drawn != state.progress.steps:
            self._draw(state)

    def _draw(self, state: TrainState) -> None:
        self._drawn = state.progress.steps
        images = self._drawn_images(state, state.config.output.sample_steps)
        names = ClassNames(self._classes(state) or 0, state.metadata["class_names"])
        titles = names.titles(self._columns(state).tolist())
        state.world.on_rank0(lambda: self._show(images.cpu(), titles, state))

    def _classes(self, state: TrainState) -> int | None:
        return state.reader.info.classes if state.config.model.classes else None

    def _columns(self, state: TrainState) -> Tensor:
        """Return the class of each column."""
        return grid_classes(state.config.model, self._classes(state))

    def _drawn_images(self, state: TrainState, steps: int) -> Tensor:
        config = state.config
        # Guidance needs an unconditional prediction, learned by condition dropout.
        guided = bool(self._classes(state) and config.drops_conditions)
        clip = may_be_pixels(state.reader.info.provenance.autoencoder, config.model.channels)
        return draw_together(
            state,
            averaged_model(state),
            {"label": self._columns(state).repeat(self.rows)},
            config.sampler(
                SamplerConfig(scheduler="dpmsolver++", cfg=1.5 if guided else None, clip=clip, seed=config.seed),
                guided=guided,
                steps=steps,
                cfg=config.output.sample_cfg if guided else None,
            ),
            null=state.objective.null,
            shape=(config.model.channels, config.model.size, config.model.size),
        )

    def _show(self, images: Tensor, titles: Sequence[str], state: TrainState) -> None:
        grid = image_grid(images, rows=self.rows, titles=titles)
        state.files.write(path_of(state), encoded(grid, ".png"))
        shown = {title: as_tensor(image_grid(images[n :: len(titles)], rows=1)) for n, title in enumerate(titles)}
        caption = "one column per class" if state.config.model.classes else "grid"
        self._trackers.images(shown or {caption: as_tensor(grid)}, state.progress.steps, "samples")


def as_tensor(picture: Image) -> Tensor:
    """Return a picture as ``[1, 3, H, W]`` uint8."""
    return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).unsqueeze(0)


def path_of(state: TrainState) -> Path:
    """Return the file of the pictures of this step."""
    return state.folder / "samples" / f"step-{state.progress.steps:08d}.png"


def draw_together(
    state: TrainState,
    model: nn.Module,
    condition: Condition,
    sampler: SamplerConfig,
    *,
    null: Condition,
    shape: tuple[int, int, int],
    path: Path | None = None,
) -> Tensor:
    """Draw one image per entry of ``condition`` (``[N, ...]`` each), shared between the ranks; called by all ranks.

    The options are those of ``fastdiff.sampling.solvers.sample``; a forward pass has at most the samples of a
    micro-batch, with guidance included. A single denoising step is told nobody (``Callback.rehearse``). ``path``
    is the file that the log names; None: that of this step.

    Returns:
        ``[N, *shape]`` fp32 latents, on every rank's device.

    Raises:
        FastdiffError: on every rank, if one of them fails.
    """
    world, count = state.world, next(len(value) for value in condition.values())
    share = -(-count // world.size)
    mine = slice(world.rank * share, (world.rank + 1) * share)
    images = torch.zeros(count, *shape, device=world.device)
    condition, null = with_path_drop(state.config.model, condition, null)
    chosen = {name: value[mine].to(world.device) for name, value in condition.items()}

    told = world.is_first and sampler.steps > 1
    if told:
        log.info(f"drawing {counted(count, 'picture')} of {sampler.steps} steps to {path or path_of(state)}")

    def draw() -> None:
        with memory_beside_training(state, halves=True):
            images[mine] = sample(
                model,
                state.config.objective,
                chosen,
                sampler,
                shape=shape,
                teacher_width=state.config.model.teacher_width,
                null=null,
                batch=max(1, state.config.batch.per_rank(world.size) // (1 if sampler.cfg is None else 2)),
                first_index=mine.start,
                progress=told,
            )

    world.on_all_ranks(draw)
    return world.sum_(images)


def memory_beside_training(state: TrainState, *, halves: bool = False) -> AbstractContextManager[None]:
    """Explain a lack of memory for the averaged model, or for its use in micro-batches (``halves``)."""
    advice = (
        "leave it more room with more ranks, a higher ZeRO stage or offloading (--deepspeed_config), or do without, "
        "with --validation.every 0 and --output.sample_every 0. The checkpoints are intact"
    )
    return explaining_memory(state, "the averaged model beside the training", advice, halves=halves)


def averaged_model(state: TrainState, dtype: torch.dtype = torch.float32, *, averaged: bool = True) -> nn.Module:
    """Return the model with the first EMA's weights, or the weights themselves if there is none.

    Called by all ranks; each gets the whole model, on its device: a copy, or its own frozen weights with an adapter
    (``SharedBase``). FastdiffError: on every rank, if one of them fails.

    Args:
        state: of the run.
        dtype: of the model.
        averaged: False: the weights themselves in any case.
    """
    flats = state.engine.flats
    weights_now = [flat.master for flat in flats]
    averages = next(iter(state.ema.averages.values()), weights_now) if averaged else weights_now
    shapes, device = state.engine.shapes, state.world.device

    def reserve() -> Room:
        with memory_beside_training(state):
            return Room.reserve(shapes, dtype, device)

    # Before the collective: a rank that ran out of memory in it would leave the other ranks waiting.
    room = state.world.on_all_ranks(reserve)
    weights = assemble(state.world, flats, averages, shapes, room)

    def build() -> nn.Module:
        if shares_base(state, dtype):
            return SharedBase(state.engine.module, weights)
        with memory_beside_training(state):
            return build_network(state.config, weights).to(device, dtype).eval()

    return watched(state, state.world.on_all_ranks(build))


def watched(state: TrainState, model: nn.Module) -> nn.Module:
    """Count each forward pass of a model as progress of the run, and end it when the run is asked to stop."""

    def before_forward(*_: object) -> None:
        state.heartbeat.again()  # a validation may outlast the hang timeout
        reason = state.guard.consensus.stop_reason
        if reason is not None:
            raise preempted(reason, state)  # the ranks agree on it, as on any error in a validation

    model.register_forward_pre_hook(before_forward)
    return model
