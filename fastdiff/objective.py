"""What the model sees and what it is asked for: ``corrupt`` before the model, ``loss`` after it.

Nothing here waits for the device or copies to it: the tables are placed there once, and every random number is drawn
there from (seed, stream, position), the noise once in ``corrupt`` and again in ``loss``, so that it is never stored.
All arithmetic is fp32, whatever the dtype of the latents and of the prediction.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fastdiff.batch import Batch, Corruption
from fastdiff.config import DiffusionConfig
from fastdiff.errors import ConfigError
from fastdiff.randomness import Stream, uniform
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


def coefficients(schedule: Schedule, prediction: Literal["epsilon", "v", "x0"]) -> Tensor:
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
        classes: number of classes; a dropped label becomes this null class.
        device: where the batches will be.
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
        classes: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not 0 <= seed < 2**64:
            raise ConfigError(f"--seed {seed}: expected 0 or above and below 2**64")
        self.config = config
        self.seed = seed
        self.null_class = classes
        self.dtype = dtype
        schedule = Schedule.build(config, "cpu", torch.float64)
        weights = loss_weights(weighting(config), schedule.snr, config.prediction, config.min_snr_gamma)
        self.table = coefficients(schedule, config.prediction).to(device=device, dtype=torch.float32)
        self.weights = weights.to(device=device, dtype=torch.float32)

    def corrupt(self, batch: Batch) -> Corruption:
        """Draw a timestep and noise for each sample and mix the noise in.

        The noise offset is part of the noise, and so of the target; the input perturbation (Ning et al. 2023,
        arXiv:2301.11706, eq. 10) is in ``noisy`` only.

        Args:
            batch: latents of fp32, bf16 or fp16, ``[B, C, H, W]``, contiguous.
        """
        noisy, time = corrupt(
            batch.latents,
            batch.position,
            self.table,
            seed=self.seed,
            streams=_STREAMS,
            offset=self.config.noise_offset,
            perturbation=self.config.input_perturbation,
            dtype=self.dtype,
        )
        return Corruption(noisy=noisy, time=time, label=self._drop_labels(batch))

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
        expected = tuple(batch.latents.shape)
        if prediction.shape not in (expected, (expected[0], 2 * expected[1], *expected[2:])):
            raise ValueError(
                f"the prediction has shape {tuple(prediction.shape)}, expected {expected} "
                "or twice the channels; check --model.channels and --model.size against the data"
            )
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
            clean=self.config.prediction != "epsilon",
        )

    def _drop_labels(self, batch: Batch) -> Tensor | None:
        """Labels for classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598, algorithm 1)."""
        if batch.label is None or not self.config.label_dropout:
            return batch.label
        drop = uniform(self.seed, Stream.LABEL_DROP, batch.position, 1)[:, 0] < self.config.label_dropout
        # masked_fill takes the class as an argument of its kernel: nothing is copied to the device.
        return batch.label.masked_fill(drop, self.null_class)
