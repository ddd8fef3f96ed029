"""What the model sees and what it is asked for: ``corrupt`` before the model, ``loss`` after it.

Nothing here waits for the device or copies to it: the tables are placed there once, and every random number
is drawn there from (seed, stream, position). All arithmetic is fp32, whatever the dtype of the latents and of
the prediction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff.batch import Batch, Corruption
from fastdiff.config import DiffusionConfig
from fastdiff.errors import ConfigError
from fastdiff.randomness import Stream, normal, uniform
from fastdiff.schedule import Schedule
from fastdiff.timesteps import uniform_timesteps


def loss_weights(config: DiffusionConfig) -> Tensor:
    """Weight of the squared error at each timestep.

    Min-SNR (Hang et al. 2023, arXiv:2303.09556, section 3.4) weights the squared error of x0 by min(snr,
    gamma). The squared error of the noise is ``snr`` times that of x0, and that of v is ``snr + 1`` times.

    Args:
        config: ``prediction``, ``min_snr_gamma`` and the schedule are read.

    Returns:
        ``[timesteps]`` float64 on the CPU, finite: where snr is 0, the weight of the noise is its limit 1.
        Those of x0 and v are 0 there, so that Min-SNR with them does not train a zero-terminal step.
    """
    snr = Schedule.build(config, "cpu", torch.float64).snr
    if config.min_snr_gamma is None:
        return torch.ones_like(snr)
    if config.prediction == "epsilon":
        return (config.min_snr_gamma / snr).clamp(max=1.0)
    clamped = snr.clamp(max=config.min_snr_gamma)
    return clamped / (snr + 1.0) if config.prediction == "v" else clamped


class Objective:
    """Denoising score matching with a discrete time (Ho et al. 2020, arXiv:2006.11239, eq. 14).

    Args:
        config: schedule, prediction, weights, noise and drops.
        seed: key of every random number, in [0, 2**64).
        classes: number of classes; a dropped label becomes this null class.
        device: where the batches will be.

    Raises:
        ConfigError: ``seed`` out of range, or a schedule that does not exist (``schedule.betas``).
    """

    def __init__(self, config: DiffusionConfig, *, seed: int, classes: int, device: torch.device | str) -> None:
        if not 0 <= seed < 2**64:
            raise ConfigError(f"--seed {seed}: expected 0 or above and below 2**64")
        self.config = config
        self.seed = seed
        self.null_class = classes
        self.schedule = Schedule.build(config, device)
        self.weights = loss_weights(config).to(device=device, dtype=torch.float32)

    def corrupt(self, batch: Batch) -> Corruption:
        """Draw a timestep and noise for each sample and mix the noise in.

        Args:
            batch: latents of any float dtype, ``[B, C, H, W]``.

        Returns:
            The corruption; ``noise`` includes the noise offset (it is part of the target) but not the input
            perturbation (Ning et al. 2023, arXiv:2301.11706, eq. 10), which is in ``noisy`` only.
        """
        shape = batch.latents.shape[1:]
        time = uniform_timesteps(self.seed, batch.position, self.config.timesteps)
        noise = normal(self.seed, Stream.NOISE, batch.position, shape)
        if self.config.noise_offset:
            offset = normal(self.seed, Stream.OFFSET, batch.position, (shape[0], 1, 1))
            noise = noise + self.config.noise_offset * offset
        added = noise
        if self.config.input_perturbation:
            extra = normal(self.seed, Stream.PERTURBATION, batch.position, shape)
            added = noise + self.config.input_perturbation * extra
        alpha, sigma = self._coefficients(time)
        noisy = alpha * batch.latents.float() + sigma * added
        return Corruption(noisy=noisy, time=time, label=self._drop_labels(batch), noise=noise)

    def loss(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """Weighted squared error of each sample, averaged over its elements.

        Args:
            prediction: ``[B, C, H, W]`` of any float dtype, or ``[B, 2C, H, W]`` of a model that also
            predicts
                a variance; that half is not trained here.
            batch: the clean latents.
            corruption: what ``corrupt`` returned for ``batch``.

        Returns:
            ``[B]`` fp32; the gradient flows to ``prediction``.

        Raises:
            ValueError: the shape of the prediction fits neither.
        """
        channels = batch.latents.shape[1]
        if prediction.shape[1] == 2 * channels:
            prediction = prediction[:, :channels]
        if prediction.shape != batch.latents.shape:
            raise ValueError(
                f"the prediction has shape {tuple(prediction.shape)}, expected {tuple(batch.latents.shape)} "
                "or twice the channels; check --model.channels and --model.size against the data"
            )
        error = (prediction.float() - self._target(batch, corruption)).square().mean(dim=(1, 2, 3))
        return error * self.weights[corruption.time]

    def _target(self, batch: Batch, corruption: Corruption) -> Tensor:
        if self.config.prediction == "epsilon":
            return corruption.noise
        clean = batch.latents.float()
        if self.config.prediction == "x0":
            return clean
        # Salimans & Ho 2022, arXiv:2202.00512, section 4.
        alpha, sigma = self._coefficients(corruption.time)
        return alpha * corruption.noise - sigma * clean

    def _coefficients(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Alpha and sigma of ``[B]`` timesteps, ``[B, 1, 1, 1]`` fp32."""
        shape = (-1, 1, 1, 1)
        return self.schedule.alpha[time].view(shape), self.schedule.sigma[time].view(shape)

    def _drop_labels(self, batch: Batch) -> Tensor | None:
        """Labels for classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598, algorithm 1)."""
        if batch.label is None or not self.config.label_dropout:
            return batch.label
        drop = uniform(self.seed, Stream.LABEL_DROP, batch.position, 1)[:, 0] < self.config.label_dropout
        # masked_fill takes the class as an argument of its kernel: nothing is copied to the device.
        return batch.label.masked_fill(drop, self.null_class)
