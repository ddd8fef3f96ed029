"""What the loops of the peers have in common: samples in memory, noise and loss in plain torch, and the facts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import BenchError
from bench.measure.session import Fact, Turn
from bench.trainers import bound
from fastdiff.batch import Condition
from fastdiff.config.objective import DdpmConfig, ObjectiveConfig
from fastdiff.config.timesteps import TimestepConfig
from fastdiff.data.shards.reader import LatentReader
from fastdiff.diffusion.ddpm import Ddpm
from fastdiff.diffusion.levels import ALPHA, SIGMA
from fastdiff.diffusion.schedules import Schedule

FLAGS = ("precision", "tf32", "compile", "channels_last", "attention", "fused", "foreach", "data")
"""Facts of a peer: how it computes."""

_TARGETS = ("epsilon", "v", "x0")
_NONE = ("noise_offset", "multires_noise_iterations", "input_perturbation", "dream")
"""Of an objective: what no peer has."""


def untrained(objective: ObjectiveConfig, timesteps: TimestepConfig) -> list[str]:
    """Options of a run that ``Noise`` and ``train`` have not, as flags; empty: they train it."""
    if not isinstance(objective, DdpmConfig):
        return [f"--objective.process {objective.process}"]
    learned = objective.learns_variance
    known = {
        "prediction": objective.predicted in (_TARGETS[:1] if learned else _TARGETS),
        "variance": objective.variance != "learned",
        # With a fixed variance the two are the same.
        "loss": objective.loss in (("mse",) if learned else ("mse", "rescaled_mse")),
        **{name: not getattr(objective, name) for name in _NONE},
    }
    flags = [f"--objective.{name} {getattr(objective, name)}" for name, has in known.items() if not has]
    density = timesteps.of(objective)
    if density != "uniform":
        flags.append(f"--timesteps.density {density}")
    return flags + (["--timesteps.stratified"] if timesteps.stratified else [])


def of_steps(objective: ObjectiveConfig) -> DdpmConfig:
    """The objective of a run that peers train: it has discrete steps.

    Raises:
        BenchError: it has not.
    """
    if not isinstance(objective, DdpmConfig):
        raise BenchError(f"--objective.process {objective.process}: the peers do not train this")
    return objective


class Peer(Protocol):
    """A training step as somebody else takes it."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    @property
    def facts(self) -> dict[str, Fact]:
        """Those of ``FLAGS`` that are its own to choose; ``fused`` of AdamW, ``foreach`` of the average."""

    def loss(self, clean: Tensor, noise: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """The mean loss of a batch, as a scalar with a gradient; ``clean`` and ``noise [B, C, H, W]``, ``time [B]``."""

    def update(self, loss: Tensor) -> None:
        """Everything behind the loss: gradient, optimizer, learning rate, average."""

    @property
    def averages(self) -> list[Tensor]:
        """The averaged weights, in the order of the model's parameters."""


class Source(Protocol):
    """Where the clean latents of a step come from."""

    kind: str
    """In words."""

    def next(self) -> tuple[Tensor, Condition]:
        """``[B, C, H, W]`` in fp32, and what they are conditioned on."""


class Noise:
    """Forward process and loss: the weighted squared error, and the bound of a learned variance where the run has one.

    Ho et al. 2020, arXiv:2006.11239; Hang et al. 2023, arXiv:2303.09556; for the bound see ``bound.py``. The tables
    are those of the run, so that it is the same mathematics; what is done with them in a step is plain.

    Raises:
        BenchError: an objective that is not among these.
    """

    def __init__(self, config: DdpmConfig, device: torch.device) -> None:
        if flags := untrained(config, TimestepConfig()):
            raise BenchError(f"{', '.join(flags)}: the peers do not train this")
        self._predicted = config.predicted
        process = Ddpm(config, device)
        self._alpha, self._sigma = (process.table[:, column].contiguous() for column in (ALPHA, SIGMA))
        self._weights = None if config.weighted == "none" else process.weights
        self._bound = _Bound(config, device) if config.learns_variance else None

    def noisy(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """``[B, C, H, W]``: the latents at ``time``."""
        return at(self._alpha, time) * clean + at(self._sigma, time) * noise

    def loss(self, prediction: Tensor, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Scalar; a second half of the channels of ``prediction`` is not trained where the variance is fixed."""
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
                raise BenchError(f"--objective.prediction {other}: the peers do not train this")


class _Bound:
    """Of a variance between the posterior's and beta, with a mean that follows from the predicted noise."""

    def __init__(self, config: DdpmConfig, device: torch.device) -> None:
        tables = Schedule.build(config, "cpu", torch.float64)
        columns = (
            tables.posterior_clean * tables.sigma / tables.alpha,
            log_posterior_variance(tables),
            tables.beta.log(),
        )
        self._per_noise, self._smallest, self._largest = (table.to(device, torch.float32) for table in columns)

    def loss(self, prediction: Tensor, variance: Tensor, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Scalar; the gradient is of ``variance`` alone."""
        smallest = at(self._smallest, time)
        estimated = bound.log_variance(variance, smallest, at(self._largest, time))
        # Of the mean of a step back; at the first one that mean is x0 itself.
        error = at(self._per_noise, time) * (prediction - noise)
        first = (time == 0).view(-1, 1, 1, 1)
        divergence = bound.divergence(error, smallest, estimated)
        return torch.where(first, bound.decoder(clean, error, estimated), divergence).mean()


def log_posterior_variance(tables: Schedule) -> Tensor:
    """``[T]``; the first variance, 0, is replaced by the second one."""
    variance = tables.posterior_variance
    return torch.cat([variance[1:2], variance[1:]]).log()


def at(table: Tensor, time: Tensor) -> Tensor:
    """``[B, 1, 1, 1]``: of the timesteps of a batch."""
    return table[time].view(-1, 1, 1, 1)


class Samples:
    """Endless shuffled batches of a folder of shards, all of which is in the memory of the device from the start.

    Args:
        folder: what ``bench.measure.synthetic.write`` wrote.
        batch: samples per batch.
        dropout: share of the samples whose class or caption is replaced by none.
        null: class that stands for none; captions have their own.
        device: where they are.
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
        """Clean latents ``[B, C, H, W]`` in fp32, sampled from their posterior if there is one, and the condition."""
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
    """fp32, so that no step has to convert; whole numbers as they are."""
    tensor = torch.from_numpy(array)
    return tensor.float() if tensor.is_floating_point() else tensor


def train(turn: Turn, peer: Peer, samples: Source, timesteps: int) -> None:
    """Step until there is enough. Facts: ``parameters`` and ``FLAGS``."""
    tf32 = turn.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    parameters = sum(p.numel() for p in peer.model.parameters())
    turn.ready(parameters=parameters, **peer.facts, tf32=tf32, attention="sdpa", data=samples.kind)
    while True:
        clean, condition = samples.next()
        noise = torch.randn_like(clean)
        time = torch.randint(timesteps, (len(clean),), device=clean.device)
        peer.update(peer.loss(clean, noise, time, condition))
        turn.after_step()
