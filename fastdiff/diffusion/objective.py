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

from fastdiff.batch import Batch, Condition
from fastdiff.config.objective import DdpmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.timesteps import TimestepConfig
from fastdiff.diffusion.ddpm import Ddpm
from fastdiff.diffusion.levels import SIGMA, TARGET_NOISE, TARGET_X0, Corruption, Levels
from fastdiff.diffusion.noise_shaping import pyramid, small_images, unit_scale
from fastdiff.diffusion.processes import build_process
from fastdiff.diffusion.timesteps import Timesteps, build_timesteps
from fastdiff.diffusion.variational import Variational
from fastdiff.errors import ConfigError
from fastdiff.rng import Stream, normal, uniform
from fastdiff_kernels.loss import weighted_mse
from fastdiff_kernels.noising import Streams, corrupt, dequantised

_STREAMS = Streams(
    timestep=Stream.TIMESTEP,
    noise=Stream.NOISE,
    posterior=Stream.POSTERIOR,
    perturbation=Stream.PERTURBATION,
    offset=Stream.OFFSET,
)


_SHORTEST = 1e-3
"""Length of a velocity below which its direction counts in proportion to its length."""


class Objective:
    """Denoising score matching or flow matching, at noise levels of one process.

    Args:
        config: process, prediction, loss, weights, noise and drops.
        seed: key of every random number, in [0, 2**64).
        null: the condition of no class or caption, one sample of each input that is dropped (``label []`` int64, or
            ``context [L, D]`` and ``pooled [P]``); inputs that are not named here are never dropped.
        device: where the batches will be.
        inputs: names of what the model is conditioned on; other columns of the data are left out. None: all.
        posterior: whether the batches hold mean and std of a posterior, which is then sampled.
        dtype: of the noisy latents. That of a model whose first act is to round its input to it saves bytes, and
            changes nothing else.
        timesteps: how the noise levels are drawn; None: evenly.
        batch_samples: samples of an optimizer step, over which stratified levels are spread.
        low_res_size: height and width of the small images that the model enlarges; 0: none.

    Raises:
        ConfigError: ``seed`` out of range, or a schedule that does not exist (``schedule.betas``).
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        *,
        seed: int,
        null: Condition,
        device: torch.device | str,
        inputs: Collection[str] | None = None,
        posterior: bool = False,
        dtype: torch.dtype = torch.float32,
        timesteps: TimestepConfig | None = None,
        batch_samples: int = 1,
        low_res_size: int = 0,
    ) -> None:
        if not 0 <= seed < 2**64:
            raise ConfigError(f"--seed {seed}: expected 0 or above and below 2**64")
        self.config = config
        self.seed = seed
        self.null = {name: value.to(device) for name, value in null.items()}
        self.inputs = inputs
        self.posterior = posterior
        self.low_res_size = low_res_size
        self.dtype = dtype
        timesteps = timesteps or TimestepConfig()
        self.process = build_process(config, device, timesteps)
        self.timesteps: Timesteps = build_timesteps(
            timesteps, config, self.process, seed=seed, batch_samples=batch_samples, device=device
        )
        self.variational = Variational(config, device) if isinstance(config, DdpmConfig) and config.has_bound else None
        self._cosine_weight = config.cosine_weight if isinstance(config, FlowConfig) else 0.0
        self._preserved_detail = config.dream_detail_preservation if isinstance(config, DdpmConfig) else 1.0
        # The loss of the noise alone does not read the latents.
        self._reads_clean = config.predicted not in ("epsilon", "score")

    def corrupt(
        self, batch: Batch, model: Callable[..., Tensor] | None = None, *, native: Tensor | None = None
    ) -> Corruption:
        """Draw a noise level and noise for each sample and mix the noise in.

        The noise offset and the multi-resolution noise are part of the noise, and so of the target; the input
        perturbation (Ning et al. 2023, arXiv:2301.11706, eq. 10) is in ``noisy`` only.

        Args:
            batch: latents of fp32, bf16 or fp16, or pixels in uint8, contiguous.
            model: whose estimate of the noise moves input and target under ``config.dream``; called as in the training
                step, without a gradient. None: neither is moved.
            native: ``[B]`` levels as the process counts them; None: drawn.
        """
        importance = None
        if native is None and not self.timesteps.in_kernel:
            native, importance = self.timesteps.draw(batch.position)
        levels = None if native is None else self.process.levels(native)
        noisy, levels = self._mix(batch, levels)
        condition = self._drop(batch) | self._made(batch)
        corruption = Corruption(noisy, levels, condition, importance=importance)
        if self.config.multires_noise_iterations:
            corruption = self._add_pyramid(corruption, batch)
        if model is None or not self.config.takes_two_passes:
            return corruption
        return self._dream(corruption, batch, model)

    @torch.no_grad()
    def _dream(self, corruption: Corruption, batch: Batch, model: Callable[..., Tensor]) -> Corruption:
        """Move input and target towards the model's own estimate of the noise, as its sampling will.

        DREAM (Zhou et al. 2023, arXiv:2312.00210, eqs. 8 to 10): ``d = sigma^p * (noise - estimate)`` is added to the
        target, and ``sigma * d`` to the input.
        """
        shape = corruption.noisy.shape
        estimate = model(corruption.noisy, corruption.time, **corruption.condition)[:, : shape[1]].float()
        sigma = corruption.levels.coefficient(SIGMA)
        correction = sigma**self._preserved_detail * (self._noise(batch, shape[1:]) - estimate)
        noisy = (corruption.noisy.float() + sigma * correction).to(corruption.noisy.dtype)
        if corruption.correction is not None:
            correction = correction + corruption.correction
        return replace(corruption, noisy=noisy, correction=correction)

    def loss(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """The loss of each sample, averaged over its elements; a sampler that learns from the losses takes them in.

        Args:
            prediction: ``[B, C, H, W]`` of fp32, bf16 or fp16, or ``[B, 2C, H, W]`` of a model that also predicts a
                variance; with a fixed variance that half is not trained.
            batch: the clean latents.
            corruption: what ``corrupt`` returned for ``batch``.

        Returns:
            ``[B]`` fp32, weighted by ``corruption.importance``; the gradient flows to ``prediction``.

        Raises:
            ValueError: the shape of the prediction fits neither.
        """
        expected = tuple(corruption.noisy.shape)
        doubled = (expected[0], 2 * expected[1], *expected[2:])
        if prediction.shape not in ((doubled,) if self.config.learns_variance else (expected, doubled)):
            raise ValueError(
                f"the prediction has shape {tuple(prediction.shape)}, expected "
                f"{doubled if self.config.learns_variance else f'{expected} or twice the channels'}; check "
                "--model.channels, --model.size and --model.learn_sigma against the data and the objective"
            )
        losses = self._losses(prediction, batch, corruption)
        self.timesteps.observe(corruption.levels.row, losses.detach(), batch.position)
        return losses if corruption.importance is None else losses * corruption.importance

    def squared_error(self, prediction: Tensor, batch: Batch, corruption: Corruption, weights: Tensor) -> Tensor:
        """Squared error of the prediction, mean over the elements of each sample times its level's weight.

        Args:
            prediction: as in ``loss``.
            batch: the clean latents.
            corruption: what ``corrupt`` returned for ``batch``.
            weights: ``[R]`` fp32, one per row of the levels' table.

        Returns:
            ``[B]`` fp32.
        """
        levels, unit = corruption.levels, self._unit(corruption.noisy.shape[1:])
        if corruption.correction is not None:  # added to the target is taken from the prediction
            prediction = prediction[:, : corruption.noisy.shape[1]].float() - corruption.correction
        return weighted_mse(
            prediction,
            batch.latents,
            batch.position,
            levels.row,
            self._rows(levels.table, unit),
            weights,
            seed=self.seed,
            streams=_STREAMS,
            offset=self.config.noise_offset / unit,
            posterior=self.posterior,
            clean=self._reads_clean,
        )

    def _losses(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        if self.variational is not None and self.variational.config.is_bound:
            return self._bound(prediction, batch, corruption, self.variational)
        losses = self.squared_error(prediction, batch, corruption, corruption.levels.weights)
        if self.variational is not None:
            losses = losses + self._bound(prediction, batch, corruption, self.variational)
        if self._cosine_weight:
            losses = losses + self._cosine_weight * self._cosine_distance(prediction, batch, corruption)
        return losses

    def _bound(self, prediction: Tensor, batch: Batch, corruption: Corruption, variational: Variational) -> Tensor:
        shape = corruption.noisy.shape[1:]
        return variational.loss(prediction, self._clean(batch), self._noise(batch, shape), corruption.levels.row)

    def _cosine_distance(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """1 - cosine of the angle between predicted and true velocity over the channels, mean over the pixels: ``[B]``.

        Yao & Wang 2025, arXiv:2501.01423, section 4 (the "velocity direction loss").
        """
        levels, noise = corruption.levels, self._noise(batch, corruption.noisy.shape[1:])
        target = levels.coefficient(TARGET_X0) * self._clean(batch) + levels.coefficient(TARGET_NOISE) * noise
        predicted = prediction[:, : target.shape[1]].float()
        # Of a network that still predicts 0 the angle has a gradient of 1 / eps; torch's 1e-8 would overflow fp16.
        return 1.0 - torch.cosine_similarity(predicted, target, dim=1, eps=_SHORTEST).mean(dim=(1, 2))

    def _mix(self, batch: Batch, levels: Levels | None) -> tuple[Tensor, Levels]:
        """``noisy`` and its levels, which the kernel draws itself if there are none (ddpm, evenly)."""
        process, row = self.process, None
        if levels is None:
            assert isinstance(process, Ddpm)
            table = process.table
        else:
            table, row = levels.table, levels.row
        channels, height, width = batch.latents.shape[1:]
        unit = self._unit((channels // 2 if self.posterior else channels, height, width))
        noisy, drawn = corrupt(
            batch.latents,
            batch.position,
            self._rows(table, unit),
            seed=self.seed,
            streams=_STREAMS,
            time=row,
            offset=self.config.noise_offset / unit,
            perturbation=self.config.input_perturbation / unit,
            posterior=self.posterior,
            # The coarser noise is added to what has not been rounded yet.
            dtype=torch.float32 if self.config.multires_noise_iterations else self.dtype,
        )
        return noisy, process.levels(drawn) if levels is None else levels

    def _add_pyramid(self, corruption: Corruption, batch: Batch) -> Corruption:
        """The coarser noise (``noise.multires``), in the input and in the target."""
        extra = self._pyramid(batch, corruption.noisy.shape[1:])
        noisy = corruption.noisy + corruption.levels.coefficient(SIGMA) * extra
        correction = corruption.levels.coefficient(TARGET_NOISE) * extra
        return replace(corruption, noisy=noisy.to(self.dtype), correction=correction)

    def _pyramid(self, batch: Batch, shape: torch.Size) -> Tensor:
        iterations, discount = self.config.multires_noise_iterations, self.config.multires_noise_discount
        return self._unit(shape) * pyramid(self.seed, batch.position, shape, iterations, discount)

    def _unit(self, shape: tuple[int, ...]) -> float:
        """Factor of the noise of every pixel: with the coarser noise, times the same, it has variance 1."""
        return unit_scale(tuple(shape), self.config.multires_noise_iterations, self.config.multires_noise_discount)

    def _rows(self, table: Tensor, unit: float) -> Tensor:
        """The rows of the kernels, whose noise is that of every pixel alone; the rest comes in the correction."""
        if unit == 1.0:
            return table
        rows = table.clone()
        rows[:, SIGMA] *= unit
        rows[:, TARGET_NOISE] *= unit
        return rows

    def _noise(self, batch: Batch, shape: torch.Size) -> Tensor:
        """The noise of the target in fp32, drawn again: ``[B, *shape]``."""
        noise = self._unit(shape) * normal(self.seed, Stream.NOISE, batch.position, shape)
        if self.config.noise_offset:
            noise += self.config.noise_offset * normal(self.seed, Stream.OFFSET, batch.position, (shape[0], 1, 1))
        if self.config.multires_noise_iterations:
            noise += self._pyramid(batch, shape)
        return noise

    def _clean(self, batch: Batch) -> Tensor:
        """x0 in fp32, ``[B, C, H, W]``: the latents, or the same sample of their posterior that ``corrupt`` took."""
        latents = dequantised(batch.latents, torch.float32)
        if not self.posterior:
            return latents
        mean, deviation = latents.chunk(2, dim=1)
        return mean + deviation * normal(self.seed, Stream.POSTERIOR, batch.position, mean.shape[1:])

    def _drop(self, batch: Batch) -> Condition:
        """Replace the condition of some samples by none (Ho & Salimans 2022, arXiv:2207.12598, algorithm 1)."""
        wanted = {n: value for n, value in batch.condition.items() if self.inputs is None or n in self.inputs}
        if not self.config.condition_dropout:
            return wanted
        drop = uniform(self.seed, Stream.LABEL_DROP, batch.position, 1)[:, 0] < self.config.condition_dropout
        return {name: self._dropped(name, value, drop) for name, value in wanted.items()}

    def _made(self, batch: Batch) -> Condition:
        """What no column of the data holds: the position that keys a dropout, and small images."""
        made: Condition = {}
        if self.inputs is not None and "position" in self.inputs:
            made["position"] = batch.position
        if self.low_res_size:
            made["low_res"] = small_images(
                self._clean(batch),
                self.low_res_size,
                noise=self.config.low_res_noise,
                seed=self.seed,
                position=batch.position,
            )
        return made

    def _dropped(self, name: str, value: Tensor, drop: Tensor) -> Tensor:
        if name not in self.null:
            return value
        return torch.where(drop.view(-1, *(1 for _ in value.shape[1:])), self.null[name].to(value.dtype), value)
