"""Log of a training: progress bar, ``metrics.jsonl`` and trackers."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fastdiff.console import log
from fastdiff.data.joined.info import JoinedInfo
from fastdiff.json_lines import Record
from fastdiff.models.compile_clock import compiled
from fastdiff.models.cost.flops import run_flops
from fastdiff.models.kernel_choice import compiles
from fastdiff.models.matrices import elements_in
from fastdiff.planning.gpus import of_device
from fastdiff.progress import Every
from fastdiff.progress_bar import Bar
from fastdiff.training.callbacks.base import Callback
from fastdiff.training.callbacks.summary import closing, time_left
from fastdiff.training.metrics import peak_gib
from fastdiff.training.prometheus import PrometheusFile
from fastdiff.training.state import TrainState
from fastdiff.training.trackers.build import Trackers

if TYPE_CHECKING:
    from fastdiff.planning.figures import Figures

_LONG_S = 60.0
"""Shortest rest of a run, in seconds, whose time is logged; the bar shows it, too, but not in the file of a job."""


class Log(Callback):
    """Progress bar, ``metrics.jsonl`` and the trackers, on rank 0.

    Args:
        state: of the run.
        trackers: which get the numbers.
        plan: figures that the run is compared with, on rank 0; None: there are none.
    """

    def __init__(self, state: TrainState, trackers: Trackers, plan: Figures | None) -> None:
        self._trackers = trackers
        self._every = Every(state.config.output.log_every)
        self._is_first = state.world.is_first
        self._told_time = False
        self.loss: float | None = None
        """Mean since the record before the last; None: no step was taken."""
        self._flops = {dense: _flops(state, float(dense)) for dense in (False, True)}
        self._compiles = compiles(state.config.performance, state.world.device)
        gpu = of_device(torch.cuda.get_device_name()) if state.world.device.type == "cuda" else None
        self._peak = gpu.peak if gpu else None
        self._lines = state.json_lines("metrics.jsonl")
        self._prometheus: PrometheusFile | None = None
        if not self._is_first:
            return
        if state.config.output.prometheus:
            self._prometheus = PrometheusFile(Path(state.config.output.prometheus), str(state.folder))
        self._planned, self._logged = plan, 0
        self._bar = Bar(
            state.folder.name,
            state.progress.steps + _steps_left(state),
            "steps",
            done=state.progress.steps,
            rate=(state.config.batch.samples, "images"),
            keeps=True,
        )

    def on_step(self, state: TrainState) -> None:
        """Advance the bar; write a record when due, and show its numbers, which the device has given anyway."""
        if self._is_first:
            self._bar.update()
        if not self._every.due(state.progress) and state.progress.samples < state.config.samples:
            return
        record = self._record(state)
        self.loss = record["loss"]
        if self._is_first:
            self._lines.write(record)
            state.retry_writes()
            if self._prometheus is not None:
                self._prometheus.write(record, state.ledger.totals())
            numbers = {name: value for name, value in record.items() if isinstance(value, float)}
            self._trackers.scalars(numbers, state.progress.steps)
            self._compare(record)
            self._tell_time(state, record["samples_per_s"])
            self._bar.figures, self._bar.further = _shown(record)

    def _tell_time(self, state: TrainState, samples_per_s: float) -> None:
        """Log once how long the rest takes, if it takes long."""
        left = state.config.samples - state.progress.samples
        if not self._told_time and left > _LONG_S * samples_per_s:
            rest = time_left(left, samples_per_s, datetime.now())
            log.info(f"{samples_per_s:,.1f} samples/s: {rest}, if nothing pauses the steps")
        self._told_time = True

    def _compare(self, record: Record) -> None:
        """Warn once if the run departs from its plan; the first record has what happens once."""
        self._logged += 1
        if self._planned is not None and self._logged > 1 and (departure := self._planned.departure(record)):
            log.warning(departure)
            self._planned = None

    def _record(self, state: TrainState) -> Record:
        read = state.meters.read()
        rate = 1e3 * state.config.batch.samples / read["step_ms"]
        norm = state.engine.grad_norm()
        flops = self._flops[state.objective.is_dense]
        mfu = rate * flops / (self._peak * state.world.size) if self._peak else None
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
            "micro": state.config.batch.per_rank(state.world.size),
            **({"compile_s": compiled.read_seconds()} if self._compiles else {}),
            **_loss_scale(state),
            **{name: read[name] for name in state.meters.names},
        }

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._is_first:
            self._bar.close()
        if self._prometheus is not None:
            self._prometheus.close()


def _steps_left(state: TrainState) -> int:
    return max(0, -(-(state.config.samples - state.progress.samples) // state.config.batch.samples))


def _shown(record: Record) -> tuple[Sequence[str], Sequence[str]]:
    """Return the figures of a record for the bar: those that it always has, and those for which there may be room."""
    norm, scale = record["grad_norm"], record.get("loss_scale")
    further = [
        f"lr {record['lr']:.2e}",
        *([] if norm is None else [f"gradient norm {norm:.3g}"]),
        *([] if scale is None else [f"loss scale {scale:g}"]),
    ]
    return [f"loss {record['loss']:.4f}"], further


def planned(state: TrainState) -> Figures | None:
    """Announce the figures of the plan: its memory, and on a GPU of the table its time; None if there are none."""
    config, world, engine = state.config, state.world, state.engine
    from fastdiff.planning.figures import figures, held_on_cpu

    if world.device.type == "cpu":
        if not config.lora.rank:  # whose frozen weights no engine counts
            trained = sum(math.prod(shape) for shape in engine.shapes.values())
            inside = elements_in(engine.matrices, engine.shapes)
            log.info(held_on_cpu(config, engine.ds_config, world.size, trained, inside, flat=engine.kind == "flat"))
        return None

    per_node = int(os.environ.get("LOCAL_SIZE", world.size))
    name, is_flat = torch.cuda.get_device_name(world.device), engine.kind == "flat"
    try:
        found = figures(config, engine.ds_config, world.size, per_node, name, flat=is_flat)
    except Exception as error:  # of a network that a plan cannot trace: the run needs none
        log.warning(f"no plan of this run: {type(error).__name__}: {error}")
        return None
    if found is not None:
        log.info(found.words(config.steps - state.progress.steps))
    return found


class Closing(Callback):
    """Last lines of a complete run, after all other callbacks."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def on_end(self, state: TrainState) -> None:
        """Say where everything is and what to do next."""
        self._log.close()  # the bar stands above
        if state.world.is_first:
            log.info(closing(state, self._log.loss))


def _loss_scale(state: TrainState) -> Record:
    """Return the factor of the loss under fp16, which halves after an overflow; nothing in other precisions."""
    scale = state.engine.loss_scale
    return {"loss_scale": float(scale["cur_scale"])} if scale else {}


def _flops(state: TrainState, dense: float) -> float:
    """Return the floating-point operations of a training step per sample, averaged over the latent sizes.

    ``dense`` as of ``run_flops``.
    """
    config, info = state.config, state.reader.info
    total = 0.0
    for number, shard in enumerate(info.shards):
        height, width = info.buckets[shard.bucket] if info.buckets else info.latent.shape[1:]
        share = info.share_of(number) if isinstance(info, JoinedInfo) else shard.samples / info.samples
        total += run_flops(config, config.model.at_size(height, width), dense=dense) * share
    return total
