"""What the model sees and what it is asked for: ``corrupt`` before the model, ``loss`` after it.

Nothing here waits for the device or copies to it: the tables are placed there once, and every random number is drawn
there from (seed, stream, position), the noise once in ``corrupt`` and again in ``loss``, so that it is never stored.
All arithmetic is fp32, whatever the dtype of the latents and of the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from fastdiff.batch import Batch, Condition, Corruption
from fastdiff.config import DiffusionConfig, Prediction
from fastdiff.errors import ConfigError
from fastdiff.randomness import Stream, normal, uniform
from fastdiff.schedule import Schedule
from fastdiff_kernels.loss import weighted_mse
from fastdiff_kernels.noising import Streams, corrupt
from fastdiff_kernels.weights import Weighting, loss_weights

_STREAMS = Streams(
    timestep=Stream.TIMESTEP,
    noise=Stream.NOISE,
    posterior=Stream.POSTERIOR,
    perturbation=Stream.PERTURBATION,
    offset=Stream.OFFSET,
)


def weighting(config: DiffusionConfig) -> Weighting:
    """The weighting that ``config`` asks for: ``auto`` is Min-SNR if its gamma is given."""
    if config.weighting == "auto":
        return "none" if config.min_snr_gamma is None else "min_snr"
    return config.weighting


def coefficients(schedule: Schedule, prediction: Prediction) -> Tensor:
    """Table of ``fastdiff_kernels.noising``: ``[T, 4]`` rows (alpha, sigma, factors of x0 and of noise in the target).

    Args:
        schedule: in float64.
        prediction: what the model predicts.
    """
    alpha, sigma = schedule.alpha, schedule.sigma
    zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
    # v: Salimans & Ho 2022, arXiv:2202.00512, section 4.
    target = {"epsilon": (zero, one), "v": (-sigma, alpha), "x0": (one, zero)}[prediction]
    return torch.stack([alpha, sigma, *target], dim=1)


class Objective:
    """Denoising score matching with a discrete time (Ho et al. 2020, arXiv:2006.11239, eq. 14).

    Args:
        config: schedule, prediction, weights, noise and drops.
        seed: key of every random number, in [0, 2**64).
        null: the condition of no class or caption, one sample of each input that is dropped (``label []`` int64, or
            ``context [L, D]`` and ``pooled [P]``); inputs that are not named here are never dropped.
        device: where the batches will be.
        inputs: names of what the model is conditioned on; other columns of the data are left out. None: all.
        posterior: whether the batches hold mean and std of a posterior, which is then sampled.
        dtype: of the noisy latents. That of a model whose first act is to round its input to it saves bytes, and
            changes nothing else.

    Raises:
        ConfigError: ``seed`` out of range, or a schedule that does not exist (``schedule.betas``).
    """

    def __init__(
        self,
        config: DiffusionConfig,
        *,
        seed: int,
        null: Condition,
        device: torch.device | str,
        inputs: Collection[str] | None = None,
        posterior: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not 0 <= seed < 2**64:
            raise ConfigError(f"--seed {seed}: expected 0 or above and below 2**64")
        self.config = config
        self.seed = seed
        self.null = {name: value.to(device) for name, value in null.items()}
        self.inputs = inputs
        self.posterior = posterior
        self.dtype = dtype
        schedule = Schedule.build(config, "cpu", torch.float64)
        weights = loss_weights(weighting(config), schedule.snr, config.predicted, config.min_snr_gamma)
        self.table = coefficients(schedule, config.predicted).to(device=device, dtype=torch.float32)
        self.weights = weights.to(device=device, dtype=torch.float32)

    def corrupt(self, batch: Batch) -> Corruption:
        """Draw a timestep and noise for each sample and mix the noise in.

        The noise offset is part of the noise, and so of the target; the input perturbation (Ning et al. 2023,
        arXiv:2301.11706, eq. 10) is in ``noisy`` only.

        Args:
            batch: latents of fp32, bf16 or fp16, contiguous.
        """
        noisy, time = corrupt(
            batch.latents,
            batch.position,
            self.table,
            seed=self.seed,
            streams=_STREAMS,
            offset=self.config.noise_offset,
            perturbation=self.config.input_perturbation,
            posterior=self.posterior,
            dtype=self.dtype,
        )
        return Corruption(noisy=noisy, time=time, condition=self._drop(batch))

    @torch.no_grad()
    def dream(self, corruption: Corruption, batch: Batch, model: Callable[..., Tensor]) -> Corruption:
        """Move input and target towards the model's own estimate of the noise, as its sampling will.

        DREAM (Zhou et al. 2023, arXiv:2312.00210, eqs. 8 to 10): ``d = sigma^p * (noise - estimate)`` is added to the
        target, and ``sigma * d`` to the input. Without ``config.dream`` nothing happens.

        Args:
            corruption: what ``corrupt`` returned for ``batch``.
            batch: the clean latents.
            model: called as in the training step, without a gradient.
        """
        if not self.config.dream:
            return corruption
        shape = corruption.noisy.shape
        estimate = model(corruption.noisy, corruption.time, **corruption.condition)[:, : shape[1]].float()
        noise = normal(self.seed, Stream.NOISE, batch.position, shape[1:])
        if self.config.noise_offset:
            noise += self.config.noise_offset * normal(self.seed, Stream.OFFSET, batch.position, (shape[1], 1, 1))
        sigma = self.table[corruption.time, 1].view(-1, 1, 1, 1)
        correction = sigma**self.config.dream_detail_preservation * (noise - estimate)
        noisy = (corruption.noisy.float() + sigma * correction).to(corruption.noisy.dtype)
        return replace(corruption, noisy=noisy, correction=correction)

    def loss(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """Weighted squared error of each sample, averaged over its elements.

        Args:
            prediction: ``[B, C, H, W]`` of fp32, bf16 or fp16, or ``[B, 2C, H, W]`` of a model that also predicts a
                variance; that half is not trained here.
            batch: the clean latents.
            corruption: what ``corrupt`` returned for ``batch``.

        Returns:
            ``[B]`` fp32; the gradient flows to ``prediction``.

        Raises:
            ValueError: the shape of the prediction fits neither.
        """
        expected = tuple(corruption.noisy.shape)
        if prediction.shape not in (expected, (expected[0], 2 * expected[1], *expected[2:])):
            raise ValueError(
                f"the prediction has shape {tuple(prediction.shape)}, expected {expected} "
                "or twice the channels; check --model.channels and --model.size against the data"
            )
        if corruption.correction is not None:  # added to the target is taken from the prediction
            prediction = prediction[:, : expected[1]].float() - corruption.correction
        return weighted_mse(
            prediction,
            batch.latents,
            batch.position,
            corruption.time,
            self.table,
            self.weights,
            seed=self.seed,
            streams=_STREAMS,
            offset=self.config.noise_offset,
            posterior=self.posterior,
            clean=self.config.predicted != "epsilon",
        )

    def _drop(self, batch: Batch) -> Condition:
        """Replace the condition of some samples by none (Ho & Salimans 2022, arXiv:2207.12598, algorithm 1)."""
        wanted = {n: value for n, value in batch.condition.items() if self.inputs is None or n in self.inputs}
        if not self.config.condition_dropout:
            return wanted
        drop = uniform(self.seed, Stream.LABEL_DROP, batch.position, 1)[:, 0] < self.config.condition_dropout
        return {name: self._dropped(name, value, drop) for name, value in wanted.items()}

    def _dropped(self, name: str, value: Tensor, drop: Tensor) -> Tensor:
        if name not in self.null:
            return value
        return torch.where(drop.view(-1, *(1 for _ in value.shape[1:])), self.null[name].to(value.dtype), value)
