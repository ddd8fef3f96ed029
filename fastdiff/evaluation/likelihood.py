"""Variational bound of a trained ddpm on data, over all of its timesteps: ``fastdiff evaluate RUN --nll``.

Each sample has a term of the bound at each timestep (``diffusion.variational``), in bits per dimension and under
independent noise. The sum of the terms and of the prior is an upper bound of -log2 p(x0) per dimension (Ho et al. 2020,
arXiv:2006.11239, eq. 5), as reported by Nichol & Dhariwal 2021 (arXiv:2102.09672). Samples and noise are functions of
the data and the seed alone, so that the results of two runs can be compared sample by sample.
"""

import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.batch import Batch
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.data.joined.reader import Shards
from fastdiff.data.loading.batches import Normaliser
from fastdiff.data.loading.training_set import check_provenance, open_data, open_held_out
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.diffusion.ddpm import coefficients, model_time
from fastdiff.diffusion.levels import clean_per_error
from fastdiff.diffusion.noise_shaping import small_images
from fastdiff.diffusion.schedules import Schedule
from fastdiff.diffusion.variational import Variational
from fastdiff.errors import ConfigError, require
from fastdiff.evaluation.figures import figure_for
from fastdiff.evaluation.validation_set import batches_of, read_batch, spread
from fastdiff.files import publish
from fastdiff.outputs import require_output
from fastdiff.progress_bar import Bar
from fastdiff.rng import Stream, normal
from fastdiff.sampling.pixels import may_be_pixels
from fastdiff.sampling.run import Run
from fastdiff_kernels.noising import dequantised

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class NllOptions:
    """Options of the measurement."""

    samples: int = 1000
    """Number of samples, spread evenly over the data; all, if there are fewer."""
    data: str = ""
    """Folder of latent shards, also at http(s):// or s3://; empty: the data of the run."""
    clip: bool | None = None
    """Clamp estimates of x0 to [-1, 1]. None: only for pixel-space models, as in sampling."""
    seed: int = 0
    """Seed of the noise."""
    batch: int = 64
    """Samples times timesteps per forward pass; the result changes only by rounding."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Bound of N samples and its parts, in bits per dimension."""

    vb: Floats
    """``[T]`` term of each timestep, mean over the samples."""
    xstart_mse: Floats
    """``[T]`` squared error of the estimate of x0."""
    mse: Floats
    """``[T]`` squared error of the noise implied by this estimate."""
    terms: Floats
    """``[N]`` sum over the timesteps, of each sample."""
    prior: Floats
    """``[N]`` KL(q(x_T | x0) || N(0, 1)) of each sample."""

    def summary(self) -> dict[str, float]:
        """Means over the samples, with standard errors."""
        named = {"total_bpd": self.terms + self.prior, "vb_bpd": self.terms, "prior_bpd": self.prior}
        found: dict[str, float] = {}
        for name, values in named.items():
            found[name] = float(values.mean())
            found[f"{name}_se"] = float(values.std(ddof=1) / math.sqrt(len(values)))
        return found


class Steps:
    """Measurements of predictions at given timesteps.

    Args:
        config: of the process ddpm.
        device: of the tensors.
        clip: clamp estimates of x0. The mean of the reverse step then follows from the clamped x0, unless the model
            predicts the mean itself.
    """

    def __init__(self, config: DdpmConfig, device: torch.device | str, *, clip: bool) -> None:
        self.clip, self._config = clip, config
        self.predicts_mean = config.predicted == "previous_x"
        self.timesteps = config.timesteps
        self.variational = Variational(config, device)
        schedule = Schedule.build(config, "cpu", torch.float64)
        columns = schedule.alpha, schedule.sigma, clean_per_error(coefficients(schedule, config.predicted))
        self._columns = [column.to(device, torch.float32) for column in (*columns, schedule.posterior_clean)]
        self._last_abar = float(schedule.alpha[-1]) ** 2

    def noisy(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return x_t ``[B, C, H, W]`` at ``[B]`` int64 timesteps."""
        alpha, sigma, *_ = self._at(time)
        return alpha * clean + sigma * noise

    def model_time(self, time: Tensor) -> Tensor:
        """Return the model's time input of ``[B]`` int64 timesteps."""
        return model_time(self._config, time)

    def measure(self, prediction: Tensor, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return ``[3, B]`` fp32: term of the bound, squared errors of x0 and of the noise."""
        alpha, sigma, clean_per, mean_per_clean = self._at(time)
        error = self.variational.error(prediction, clean, noise, time)
        clean_error = clean_per * error
        if self.clip:
            clean_error = clean - (clean - clean_error).clamp(-1.0, 1.0)
        mean_error = error if self.predicts_mean else mean_per_clean * clean_error
        squares = [e.square().mean(dim=(1, 2, 3)) for e in (clean_error, alpha / sigma * clean_error)]
        return torch.stack([self.variational.bits(mean_error, prediction, clean, time), *squares])

    def prior(self, clean: Tensor) -> Tensor:
        """Return ``[B]`` fp64: KL(N(sqrt(abar) x0, 1 - abar) || N(0, 1)) at the last timestep, bits per dimension."""
        abar = self._last_abar
        divergence = 0.5 * (abar * clean.double().square() - abar - math.log1p(-abar))
        return divergence.mean(dim=(1, 2, 3)) / math.log(2.0)

    def _at(self, time: Tensor) -> list[Tensor]:
        return [column[time].view(-1, 1, 1, 1) for column in self._columns]


@torch.no_grad()
def measure(
    model: Callable[..., Tensor],
    config: DdpmConfig,
    batches: Iterable[Batch],
    options: NllOptions,
    bar: Bar | None = None,
) -> Likelihood:
    """Measure the bound.

    Args:
        model: called with ``[B, C, H, W]`` fp32 noisy latents, ``[B]`` time inputs, and the condition by name.
        config: of the process ddpm, resolved.
        batches: of clean x0 in fp32; ``position`` is the number of the sample, which keys its noise.
        options: clip, seed and batch are read; a clip of None is False here, because the data are unknown.
        bar: advances by samples times timesteps.
    """
    steps: Steps | None = None
    sums, terms, priors = torch.zeros(3, config.timesteps, dtype=torch.float64), [], []
    for batch in batches:
        device = batch.latents.device
        steps = steps or Steps(config, device, clip=bool(options.clip))
        at_once = max(1, options.batch // len(batch.latents))
        found = []
        for first in range(0, config.timesteps, at_once):
            time = torch.arange(first, min(first + at_once, config.timesteps), device=device)
            found.append(_measure_at(time, model, steps, batch, options.seed))
            if bar is not None:
                bar.update(found[-1][0].numel())
        of_batch = torch.cat(found, dim=1)
        sums += of_batch.sum(dim=2).cpu()
        terms.append(of_batch[0].sum(dim=0).cpu())
        priors.append(steps.prior(batch.latents).cpu())
    means = sums / sum(map(len, terms))
    return Likelihood(*(part.numpy() for part in (*means, torch.cat(terms), torch.cat(priors))))


def evaluate_nll(run: Run, options: NllOptions, *, progress: bool = False) -> tuple[dict[str, Any], Likelihood]:
    """Measure a run and write ``nll.json`` and ``nll.npz``: ``vb``, ``xstart_mse``, ``mse`` ``[T]``, ``total`` ``[N]``.

    The results of a published file lie beside it.

    Returns:
        The content of ``nll.json``, and the full measurement.

    Raises:
        ConfigError: the run has no such bound, or the data do not fit it.
        DataError: the data are damaged.
        StorageError: the data cannot be read.
    """
    objective = check(run)
    require(0 <= options.seed < 2**64, f"--seed {options.seed}: from 0 to 2**64 - 1")
    folder = run.result("nll.json").parent
    require(os.access(folder, os.W_OK), f"{folder} cannot be written, and nll.json goes there; copy the file elsewhere")
    require_output(run.result("nll.json"))
    with _open(run, options.data) as reader:
        if options.clip is None:
            made_by = reader.info.provenance.autoencoder
            options = replace(options, clip=may_be_pixels(made_by, run.config.model.channels))
        index = spread(len(reader), options.samples)
        require(len(index) >= 2, f"{len(index)} samples have no standard error; at least 2")
        total = len(index) * objective.timesteps
        with Bar("nll", total, "steps", shown=progress) as bar:
            low_res_size = run.config.model.low_res_size
            batches = read_clean(reader, index, run.model.inputs, run.device, options.seed, low_res_size)
            found = measure(run.model, objective, batches, options, bar)
    result = found.summary() | {
        "samples": len(index),
        "clip_denoised": options.clip,
        "seed": options.seed,
        "data": reader.info.digest,
        "step": run.step,
        "weights": run.description,
    }
    _write(run, result, found)
    return result, found


def read_clean(
    reader: Shards,
    index: npt.NDArray[np.int64],
    inputs: Iterable[str],
    device: torch.device,
    seed: int,
    low_res_size: int = 0,
) -> Iterator[Batch]:
    """Read samples in small batches, each of one image size.

    Args:
        reader: of the data.
        index: ``[N]`` numbers of the samples in the data; their positions are 0 to N - 1.
        inputs: names of the conditions to keep.
        device: of the batches.
        seed: of the samples of posteriors.
        low_res_size: height and width of the small images that the model enlarges; 0: none.

    Yields:
        Batches with x0 in fp32 as latents; a posterior gives one sample, keyed by the position.
    """
    normalise = Normaliser(reader.info, device)
    for rows in batches_of(reader.info, index):
        batch = read_batch(reader, index, rows, normalise)
        clean = dequantised(batch.latents, torch.float32)
        if reader.info.kind == "posterior":
            mean, deviation = clean.chunk(2, dim=1)  # [B, 2C, H, W] -> 2 x [B, C, H, W]
            clean = mean + deviation * normal(seed, Stream.POSTERIOR, batch.position, mean.shape[1:])
        condition = {name: value for name, value in batch.condition.items() if name in inputs}
        if low_res_size:
            condition["low_res"] = small_images(clean, low_res_size, noise=0.0, seed=seed, position=batch.position)
        yield replace(batch, latents=clean, condition=condition)


def check(run: Run) -> DdpmConfig:
    """Return the objective of a run; ConfigError: its process has no Gaussian steps, or its bound is infinite."""
    objective = run.config.objective
    if not isinstance(objective, DdpmConfig):
        raise ConfigError(
            f"{run.folder} was trained with --objective.process {objective.process}, which samples by a differential "
            "equation and not by Gaussian steps: only ddpm has the variational bound"
        )
    require(
        objective.determines_x0,
        f"{run.folder} predicts the noise, and its schedule ends in pure noise "
        f"({'zero_terminal_snr' if objective.zero_terminal_snr else objective.schedule}): the KL of the first reverse "
        "step is infinite; measure a run with --objective.prediction v or x0",
    )
    return objective


def _measure_at(time: Tensor, model: Callable[..., Tensor], steps: Steps, batch: Batch, seed: int) -> Tensor:
    """Apply ``Steps.measure`` to all samples at each of ``[t]`` timesteps: ``[3, t, B]`` float64."""
    count = len(time)
    clean = batch.latents.repeat(count, 1, 1, 1)  # [B, C, H, W] -> [t B, C, H, W]
    condition = {name: value.repeat(count, *(1 for _ in value.shape[1:])) for name, value in batch.condition.items()}
    key = (batch.position * steps.timesteps + time[:, None]).flatten()
    time = time.repeat_interleave(len(batch.latents))
    noise = normal(seed, Stream.LIKELIHOOD, key, clean.shape[1:])
    prediction = model(steps.noisy(clean, noise, time), steps.model_time(time), **condition)
    return steps.measure(prediction, clean, noise, time).double().view(3, count, -1)


def _open(run: Run, path: str) -> Shards:
    """Open the data of the run, or other data that were encoded alike."""
    config = run.config
    require(
        bool(path) or not config.data.online,
        f"{run.folder} was trained on images encoded during training; encode some with `fastdiff encode` and "
        "give their folder as --data",
    )
    require(bool(path) or not run.is_file, f"{run.folder} is a file of weights: name the data to measure by --data")
    data = DataConfig(path=path, cache=config.data.cache)
    if not path:
        data = replace(data, path=config.data.path, sets=config.data.sets)
    reader = open_held_out(config.model, data, run.class_names.names, "--data")
    check_provenance(config.pretrained, data, reader.info)
    if path and not (config.data.online or run.is_file):
        with open_data(config, torch.device("cpu")) as training:
            alike = _encoding(reader.info) == _encoding(training.info)
        require(alike, f"--data {path} was encoded differently from {config.data.described}; encode both alike")
    return reader


def _encoding(info: DatasetInfo) -> tuple[object, ...]:
    """Return everything that determines a model's input besides the image."""
    made = info.provenance
    return info.kind, info.normalisation, made.autoencoder_digest, made.text_encoder_digest


def _write(run: Run, result: dict[str, Any], found: Likelihood) -> None:
    """Write each file atomically."""
    arrays = io.BytesIO()
    np.savez(arrays, vb=found.vb, xstart_mse=found.xstart_mse, mse=found.mse, total=found.terms + found.prior)
    publish(run.result("nll.npz"), arrays.getvalue())
    publish(run.result("nll.json"), json.dumps(result, indent=2).encode() + b"\n")


_COLOURS = "#0072B2", "#D55E00", "#009E73"


def draw(path: Path, found: Likelihood) -> None:
    """Write the plot (``figures.figure_for``): bound, errors of x0 and of the noise by timestep, on logarithmic axes.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: with the path; it cannot be written.
    """
    curves = {
        f"variational bound, bits per dimension: {found.vb.sum():.3f} in all": found.vb,
        "squared error of x0": found.xstart_mse,
        "squared error of the noise": found.mse,
    }
    time = np.arange(1, len(found.vb) + 1)  # from 1, for the logarithm
    with figure_for(path, (7.0, 7.5)) as figure:
        for axes, colour, (title, curve) in zip(
            figure.subplots(len(curves), 1, sharex=True), _COLOURS, curves.items(), strict=True
        ):
            axes.plot(time, curve, color=colour, linewidth=1.5)
            axes.set(title=title, xscale="log", yscale="log")
        axes.set_xlabel("timestep t + 1:  less noise  ←   →  more noise")
