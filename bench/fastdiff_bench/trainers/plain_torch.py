"""Shared parts of the baseline loops: samples in memory, noise and loss in plain torch, and the facts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.batch import Condition
from fastdiff.config.sections.objective import DdpmConfig, ObjectiveConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.data.shards.reader import LatentReader
from fastdiff.diffusion.ddpm import Ddpm
from fastdiff.diffusion.levels import ALPHA, SIGMA
from fastdiff.diffusion.schedules import Schedule
from fastdiff_bench import BenchError
from fastdiff_bench.measure.session import Fact, StepTimer
from fastdiff_bench.trainers import bound

FLAGS = ("precision", "tf32", "compile", "channels_last", "attention", "fused", "foreach", "data")
"""Facts of a baseline: its computation settings."""

_TARGETS = ("epsilon", "v", "x0")
_NONE = ("noise_offset", "multires_noise_iterations", "input_perturbation", "dream")
"""Objective options that no baseline supports."""


def untrained(objective: ObjectiveConfig, timesteps: TimestepConfig) -> list[str]:
    """Return the options of a run that ``Noise`` and ``train`` do not support, as flags; empty: all are supported."""
    if not isinstance(objective, DdpmConfig):
        return [f"--objective.process {objective.process}"]
    learned = objective.learns_variance
    known = {
        "prediction": objective.predicted in (_TARGETS[:1] if learned else _TARGETS),
        "variance": objective.variance != "learned",
        # With a fixed variance both losses are equal.
        "loss": objective.loss in (("mse",) if learned else ("mse", "rescaled_mse")),
        **{name: not getattr(objective, name) for name in _NONE},
    }
    flags = [f"--objective.{name} {getattr(objective, name)}" for name, has in known.items() if not has]
    density = timesteps.of(objective)
    if density != "uniform":
        flags.append(f"--timesteps.density {density}")
    return flags + (["--timesteps.stratified"] if timesteps.stratified else [])


def of_steps(objective: ObjectiveConfig) -> DdpmConfig:
    """Return the objective of a run that baselines support: it has discrete timesteps.

    Raises:
        BenchError: the objective is another one.
    """
    if not isinstance(objective, DdpmConfig):
        raise BenchError(f"--objective.process {objective.process}: the baselines do not support this")
    return objective


class Peer(Protocol):
    """Training step of a baseline."""

    @property
    def model(self) -> nn.Module:
        """The trained network."""

    @property
    def facts(self) -> dict[str, Fact]:
        """The facts of ``FLAGS`` that it chooses itself; ``fused`` refers to AdamW, ``foreach`` to the EMA."""

    def loss(self, clean: Tensor, noise: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """Return the mean loss of a batch with a gradient; ``clean`` and ``noise [B, C, H, W]``, ``time [B]``."""

    def update(self, loss: Tensor) -> None:
        """Take the rest of the step after the loss: gradient, optimizer, learning rate, EMA."""

    @property
    def averages(self) -> list[Tensor]:
        """The averaged weights, in the order of the model's parameters."""


class Source(Protocol):
    """Source of the clean latents of a step."""

    kind: str
    """Description in words."""

    def next(self) -> tuple[Tensor, Condition]:
        """Return latents ``[B, C, H, W]`` in fp32, and their condition."""


class Noise:
    """Forward process and loss: the weighted squared error, and for a learned variance its bound.

    Ho et al. 2020, arXiv:2006.11239; Hang et al. 2023, arXiv:2303.09556; for the bound see ``bound.py``. The tables
    are those of the run, so the mathematics is the same; the computation of a step is plain torch.

    Raises:
        BenchError: the objective is not supported.
    """

    def __init__(self, config: DdpmConfig, device: torch.device) -> None:
        if flags := untrained(config, TimestepConfig()):
            raise BenchError(f"{', '.join(flags)}: the baselines do not support this")
        self._predicted = config.predicted
        process = Ddpm(config, device)
        self._alpha, self._sigma = (process.table[:, column].contiguous() for column in (ALPHA, SIGMA))
        self._weights = None if config.weighted == "none" else process.weights
        self._bound = _Bound(config, device) if config.learns_variance else None

    def noisy(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return the latents at ``time``, ``[B, C, H, W]``."""
        return at(self._alpha, time) * clean + at(self._sigma, time) * noise

    def loss(self, prediction: Tensor, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return a scalar; with a fixed variance a second half of the channels of ``prediction`` is ignored."""
        prediction, variance = prediction[:, : clean.shape[1]].float(), prediction[:, clean.shape[1] :].float()
        loss = self._squared_error(prediction, self._target(clean, noise, time), time)
        if self._bound is None:
            return loss
        return loss + self._bound.loss(prediction.detach(), variance, clean, noise, time)

    def _squared_error(self, prediction: Tensor, target: Tensor, time: Tensor) -> Tensor:
        if self._weights is None:
            return F.mse_loss(prediction, target)
        by_sample = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
        return (by_sample * self._weights[time]).mean()

    def _target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        match self._predicted:
            case "epsilon":
                return noise
            case "x0":
                return clean
            case "v":
                return at(self._alpha, time) * noise - at(self._sigma, time) * clean
            case other:
                raise BenchError(f"--objective.prediction {other}: the baselines do not support this")


class _Bound:
    """Bound of a variance between the posterior's and beta, with a mean that follows from the predicted noise."""

    def __init__(self, config: DdpmConfig, device: torch.device) -> None:
        tables = Schedule.build(config, "cpu", torch.float64)
        columns = (
            tables.posterior_clean * tables.sigma / tables.alpha,
            log_posterior_variance(tables),
            tables.beta.log(),
        )
        self._per_noise, self._smallest, self._largest = (table.to(device, torch.float32) for table in columns)

    def loss(self, prediction: Tensor, variance: Tensor, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return a scalar; only ``variance`` gets a gradient."""
        smallest = at(self._smallest, time)
        estimated = bound.log_variance(variance, smallest, at(self._largest, time))
        # Error of the mean of the previous step; at the first step that mean is x0 itself.
        error = at(self._per_noise, time) * (prediction - noise)
        first = (time == 0).view(-1, 1, 1, 1)
        divergence = bound.divergence(error, smallest, estimated)
        return torch.where(first, bound.decoder(clean, error, estimated), divergence).mean()


def log_posterior_variance(tables: Schedule) -> Tensor:
    """Return ``[T]``; the first variance, 0, is replaced by the second one."""
    variance = tables.posterior_variance
    return torch.cat([variance[1:2], variance[1:]]).log()


def at(table: Tensor, time: Tensor) -> Tensor:
    """Return the table's values at the timesteps of a batch, ``[B, 1, 1, 1]``."""
    return table[time].view(-1, 1, 1, 1)


class Samples:
    """Endless shuffled batches of a folder of shards, held completely in the memory of the device.

    Args:
        folder: written by ``fastdiff_bench.measure.synthetic.write``.
        batch: samples per batch.
        dropout: share of the samples whose class or caption is replaced by the null condition.
        null: null class; captions have their own.
        device: of the data.
    """

    kind = "latents in the memory of the device"

    def __init__(self, folder: Path, batch: int, dropout: float, null: int | None, device: torch.device) -> None:
        with LatentReader(folder) as reader:
            stored = {name: _in_memory(a) for name, a in reader.read(np.arange(len(reader))).items()}
            nothing = {name: _in_memory(array) for name, array in reader.null().items()}
        if null is not None:
            nothing["label"] = torch.tensor(null)
        normalisation, latents = reader.info.normalisation, stored.pop("latent")
        shift, scale = (torch.tensor(v).view(-1, 1, 1) for v in (normalisation.shift, normalisation.scale))
        self._latents = ((latents - shift) * scale).to(device)
        self._condition = {name: values.to(device) for name, values in stored.items()}
        self._null = {name: value.to(device) for name, value in nothing.items()}
        self._is_posterior = reader.info.kind == "posterior"
        self._batch, self._dropout = batch, dropout
        self._order: Iterator[Tensor] = iter(())

    def next(self) -> tuple[Tensor, Condition]:
        """Return clean latents ``[B, C, H, W]`` in fp32, sampled if they are posteriors, and the condition."""
        chosen = next(self._order, None)
        if chosen is None:
            order = torch.randperm(len(self._latents), device=self._latents.device)
            self._order = iter(torch.split(order[: len(order) // self._batch * self._batch], self._batch))
            chosen = next(self._order)
        latents = self._latents[chosen]
        if self._is_posterior:
            mean, deviation = latents.chunk(2, dim=1)
            latents = mean + deviation * torch.randn_like(mean)
        return latents, self._dropped({name: values[chosen] for name, values in self._condition.items()})

    def _dropped(self, condition: Condition) -> Condition:
        drop = torch.rand(self._batch, device=self._latents.device) < self._dropout
        return {
            name: torch.where(drop.view(-1, *(1,) * (value.ndim - 1)), self._null[name], value)
            if name in self._null
            else value
            for name, value in condition.items()
        }


def _in_memory(array: npt.NDArray[Any]) -> Tensor:
    """Convert to fp32 once, so that no step has to; integers stay as they are."""
    tensor = torch.from_numpy(array)
    return tensor.float() if tensor.is_floating_point() else tensor


def train(timer: StepTimer, peer: Peer, samples: Source, timesteps: int) -> None:
    """Step until ``Enough``; facts: ``parameters`` and ``FLAGS``."""
    tf32 = timer.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    parameters = sum(p.numel() for p in peer.model.parameters())
    timer.ready(parameters=parameters, **peer.facts, tf32=tf32, attention="sdpa", data=samples.kind)
    while True:
        clean, condition = samples.next()
        noise = torch.randn_like(clean)
        time = torch.randint(timesteps, (len(clean),), device=clean.device)
        peer.update(peer.loss(clean, noise, time, condition))
        timer.after_step()
