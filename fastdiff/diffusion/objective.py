"""Training objective: ``add_noise`` makes the model's input, ``loss`` compares its output with the target.

No code here synchronises with the device or copies to it: the tables are placed there once, and every random number is
drawn there from (seed, stream, position). The noise is drawn in ``add_noise`` and again in ``loss``, so it is never
stored. All arithmetic is fp32, for every dtype of the latents and of the prediction.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastdiff.batch import Batch, Condition, Output, split
from fastdiff.conditions import TEACHER_TOKEN
from fastdiff.config.sections.objective import DdpmConfig, FlowConfig, ObjectiveConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.diffusion.alignment import Alignment
from fastdiff.diffusion.class_token import ClassToken
from fastdiff.diffusion.ddpm import Ddpm
from fastdiff.diffusion.levels import SIGMA, TARGET_NOISE, TARGET_X0, Corruption, Levels
from fastdiff.diffusion.noise_shaping import pyramid, small_images, unit_scale
from fastdiff.diffusion.processes import build_process
from fastdiff.diffusion.routing import TokenRouting
from fastdiff.diffusion.timesteps import Timesteps, build_timesteps
from fastdiff.diffusion.variational import Variational
from fastdiff.errors import ConfigError, require
from fastdiff.rng import Stream, normal, uniform
from fastdiff_kernels.loss import weighted_mse
from fastdiff_kernels.noising import Streams, corrupt, dequantised

OwnLoss = Callable[[Tensor, Tensor, Levels, Tensor], Tensor]
"""Loss of a user: prediction and target ``[B, C, H, W]`` fp32, noise levels, positions ``[B]``, to losses ``[B]``."""
_STREAMS = Streams(
    timestep=Stream.TIMESTEP,
    noise=Stream.NOISE,
    posterior=Stream.POSTERIOR,
    perturbation=Stream.PERTURBATION,
    offset=Stream.OFFSET,
)


_SHORTEST = 1e-3
"""Length of a velocity below which the cosine distance scales with the length."""


class Objective:
    """Denoising score matching or flow matching at the noise levels of one process.

    Args:
        config: process, prediction, loss, weights, noise and drops.
        seed: key of every random number, in [0, 2**64).
        null: the null condition, one sample of each input that can be dropped (``label []`` int64, or
            ``context [L, D]`` and ``pooled [P]``); other inputs are never dropped.
        device: device of the batches.
        inputs: names of the model's conditions; other columns of the data are ignored. None: all.
        posterior: whether the batches hold mean and std of a posterior, which is then sampled.
        dtype: dtype of the noisy latents. A model that first casts its input to this dtype gets the same values from
            fewer bytes.
        timesteps: distribution of the noise levels, with the time shift as a number; None: uniform.
        batch_samples: samples of an optimizer step, over which stratified levels are spread.
        low_res_size: height and width of the model's low-resolution input; 0: none.
        own_loss: the user's loss of ``config.plugin``; None: the squared error.
        set_dropouts: share of dropped conditions of each data set, in place of ``config.condition_dropout``; empty:
            none has one of its own.
        routing: what leaves tokens out of the model; None: all pass all of its blocks.
        aligned_token: whether the class token of a teacher is aligned beside the patches (``ModelConfig``).

    Raises:
        ConfigError: ``seed`` out of range, or unknown schedule (``fastdiff.diffusion.schedules.betas``).
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
        own_loss: OwnLoss | None = None,
        set_dropouts: Sequence[float] = (),
        routing: TokenRouting | None = None,
        aligned_token: bool = False,
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
        hybrid = self.variational is not None and not self.variational.config.is_bound
        weight = config.teacher_weight if isinstance(config, FlowConfig) else 0.0
        self._token = ClassToken(weight, seed=seed, dtype=dtype) if weight else None
        samples = config.alignment_steps * batch_samples if config.alignment_steps else None
        self._alignment = (
            Alignment(config.alignment_weight, samples, token=aligned_token) if config.alignment_weight else None
        )
        names = ["mse", "vb"] if hybrid else ["loss_latents"] if self._token or self._alignment else []
        names += ["loss_teacher"] if self._token else []
        self.part_names = (*names, *(["loss_alignment"] if self._alignment else []))
        self.parts: tuple[Tensor, ...] = ()
        """Parts of the last losses, ``[B]`` fp32 each, in the order of ``part_names``; unlike these, not weighted by
        the importance of the timesteps."""
        self._own_loss = own_loss
        self._drops = any(set_dropouts or (config.condition_dropout,))
        self._set_dropouts = torch.tensor(set_dropouts, device=device) if set_dropouts else None
        self.routing = routing
        self._contrastive_weight = config.contrastive_weight if isinstance(config, FlowConfig) else 0.0
        self._cosine_weight = config.cosine_weight if isinstance(config, FlowConfig) else 0.0
        self._preserved_detail = config.dream_detail_preservation if isinstance(config, DdpmConfig) else 1.0
        # The target of epsilon and score prediction does not contain the latents.
        self._reads_clean = config.predicted not in ("epsilon", "score")

    @property
    def is_dense(self) -> bool:
        """Whether all tokens pass all blocks of the model in the present step."""
        return self.routing is None or self.routing.is_dense

    def add_noise(
        self, batch: Batch, model: Callable[..., Output] | None = None, *, native: Tensor | None = None
    ) -> Corruption:
        """Draw a noise level and noise for each sample and add the noise.

        Noise offset and multi-resolution noise are part of the noise and of the target; the input perturbation (Ning
        et al. 2023, arXiv:2301.11706, eq. 10) is in ``noisy`` only.

        Args:
            batch: latents of fp32, bf16 or fp16, or pixels in uint8, contiguous.
            model: network whose noise estimate corrects input and target with ``config.dream``; called as in the
                training step, without a gradient. None: no correction.
            native: ``[B]`` native levels of the process; None: draw them.
        """
        corruption = self.corrupted(batch, native)
        if model is None or not self.config.takes_two_passes:
            return corruption
        return self._dream(corruption, batch, model)

    def corrupted(self, batch: Batch, native: Tensor | None = None) -> Corruption:
        """Return what ``add_noise`` does without a model: for the step itself, and for its statistics."""
        importance = None
        if native is None and not self.timesteps.in_kernel:
            native, importance = self.timesteps.draw(batch.position)
        levels = None if native is None else self.process.levels(native)
        noisy, levels = self._mix(batch, levels)
        condition = self._drop(batch) | self._made(batch, levels)
        corruption = Corruption(noisy, levels, condition, importance=importance)
        if self.config.multires_noise_iterations:
            return self._add_pyramid(corruption, batch)
        return corruption

    @torch.no_grad()
    def _dream(self, corruption: Corruption, batch: Batch, model: Callable[..., Output]) -> Corruption:
        """Move input and target towards the model's own noise estimate, to align training with sampling.

        DREAM (Zhou et al. 2023, arXiv:2312.00210, eqs. 8 to 10): ``d = sigma^p * (noise - estimate)`` is added to the
        target, and ``sigma * d`` to the input.
        """
        shape = corruption.noisy.shape
        output = split(model(corruption.noisy, corruption.time, **corruption.condition))
        estimate = output.latents[:, : shape[1]].float()
        sigma = corruption.levels.coefficient(SIGMA)
        correction = sigma**self._preserved_detail * (self._noise(batch, shape[1:]) - estimate)
        noisy = (corruption.noisy.float() + sigma * correction).to(corruption.noisy.dtype)
        if corruption.correction is not None:
            correction = correction + corruption.correction
        return replace(corruption, noisy=noisy, correction=correction)

    def loss(self, output: Output, batch: Batch, corruption: Corruption, *, recorded: bool = True) -> Tensor:
        """Return the loss of each sample, averaged over its elements, whose losses a mask of the batch multiplies.

        Args:
            output: ``[B, C, H, W]`` of fp32, bf16 or fp16, or ``[B, 2C, H, W]`` of a model that also predicts a
                variance; for a fixed variance the second half is not trained. With it the prediction of the class token
                of a teacher ``[B, D]``, if the objective has one.
            batch: the clean latents.
            corruption: what ``add_noise`` returned for ``batch``.
            recorded: whether a loss-aware timestep sampler records it.

        Returns:
            ``[B]`` fp32, weighted by ``corruption.importance``; the gradient flows to ``output``.

        Raises:
            ValueError: a prediction has another shape.
            ConfigError: a contrastive loss of an odd number of samples.
        """
        prediction, of_token, projected = split(output)
        expected = tuple(corruption.noisy.shape)
        doubled = (expected[0], 2 * expected[1], *expected[2:])
        if prediction.shape not in ((doubled,) if self.config.learns_variance else (expected, doubled)):
            raise ValueError(
                f"the prediction has shape {tuple(prediction.shape)}, expected "
                f"{doubled if self.config.learns_variance else f'{expected} or twice the channels'}; check "
                "--model.channels, --model.size and --model.learn_sigma against the data and the objective"
            )
        self.parts = ()
        losses = self.losses(prediction, batch, corruption)
        if self._contrastive_weight:
            losses = losses - self._contrastive_weight * self._error_of_others(prediction, batch, corruption)
        if self._token is not None:
            if of_token is None:
                raise ValueError("the model predicts no class token of a teacher; check --model.teacher_width")
            of_teacher = self._token.loss(of_token, batch, corruption.levels)
            self.parts = losses.detach(), of_teacher.detach()
            losses = losses + of_teacher
        if recorded:
            self.timesteps.observe(corruption.levels.row, losses.detach(), batch.position)
        if self._alignment is not None and projected is not None:
            losses = losses + self._aligned(losses, projected, batch, self._alignment)
        return losses if corruption.importance is None else losses * corruption.importance

    def _aligned(self, losses: Tensor, projected: Tensor, batch: Batch, alignment: Alignment) -> Tensor:
        """Return the loss of the alignment, which is a part of its own."""
        of_features = alignment.loss(projected, batch)
        self.parts = (*(self.parts or (losses.detach(),)), of_features.detach())
        return of_features

    def squared_error(self, output: Output, batch: Batch, corruption: Corruption, weights: Tensor) -> Tensor:
        """Return the squared error of the prediction: mean over the elements of each sample times its level's weight.

        Args:
            output: as in ``loss``; a class token does not count.
            batch: the clean latents.
            corruption: what ``add_noise`` returned for ``batch``.
            weights: ``[R]`` fp32, one per row of the levels' table.

        Returns:
            ``[B]`` fp32.
        """
        levels, unit = corruption.levels, self._unit(corruption.noisy.shape[1:])
        prediction = split(output).latents
        if corruption.correction is not None:  # subtracting it from the prediction adds it to the target
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
            mask=self._mask(batch),
        )

    def losses(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """Return the losses as ``loss``, not weighted by importance, of a prediction of the right shape."""
        if self.variational is not None and self.variational.config.is_bound:
            return self._bound(prediction, batch, corruption, self.variational)
        if self._own_loss is None:
            losses = self.squared_error(prediction, batch, corruption, corruption.levels.weights)
        else:
            losses = self._of_user(prediction, batch, corruption, self._own_loss)
        if self.variational is not None:
            bound = self._bound(prediction, batch, corruption, self.variational)
            self.parts = losses.detach(), bound.detach()
            losses = losses + bound
        if self._cosine_weight:
            losses = losses + self._cosine_weight * self._cosine_distance(prediction, batch, corruption)
        return losses

    def _bound(self, prediction: Tensor, batch: Batch, corruption: Corruption, variational: Variational) -> Tensor:
        shape = corruption.noisy.shape[1:]
        noise, mask = self._noise(batch, shape), self._mask(batch)
        return variational.loss(prediction, self.clean(batch), noise, corruption.levels.row, mask)

    def _mask(self, batch: Batch) -> Tensor | None:
        """Return the weights of the positions in the loss, ``[B, H, W]`` fp16; None: all are 1."""
        return None if self.config.masked is False else batch.mask

    def _of_user(self, prediction: Tensor, batch: Batch, corruption: Corruption, loss: OwnLoss) -> Tensor:
        """Return the user's loss times the weight of its level: ``[B]`` fp32."""
        levels, target = corruption.levels, self._target(batch, corruption)
        losses = loss(prediction[:, : target.shape[1]].float(), target, levels, batch.position)
        return losses.float() * levels.weights[levels.row]

    def _target(self, batch: Batch, corruption: Corruption) -> Tensor:
        """Return the target of the prediction without DREAM's correction: ``[B, C, H, W]`` fp32."""
        levels, noise = corruption.levels, self._noise(batch, corruption.noisy.shape[1:])
        return levels.coefficient(TARGET_X0) * self.clean(batch) + levels.coefficient(TARGET_NOISE) * noise

    def _cosine_distance(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """Return 1 - cosine similarity of predicted and true velocity over the channels, mean over the pixels: ``[B]``.

        Yao & Wang 2025, arXiv:2501.01423, section 4 (the "velocity direction loss").
        """
        target = self._target(batch, corruption)
        predicted = prediction[:, : target.shape[1]].float()
        # At a prediction of 0, as of a fresh network, the gradient is 1 / eps; torch's 1e-8 would overflow fp16.
        similarity = torch.cosine_similarity(predicted, target, dim=1, eps=_SHORTEST)  # -> [B, H, W]
        mask = self._mask(batch)
        if mask is None:
            return 1.0 - similarity.mean(dim=(1, 2))
        return ((1.0 - similarity) * mask).mean(dim=(1, 2))

    def _error_of_others(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """Return the squared error against the target of the other sample of a pair, weighted as its own: ``[B]``.

        Contrastive flow matching (Stoica et al. 2025, arXiv:2506.05350). A pair has the positions 2n and 2n + 1, which
        are in one micro-batch whatever ranks there are, if that is even; published code takes the neighbour in the
        batch of a rank, which depends on them.
        """
        count = len(batch.position)
        require(
            count % 2 == 0,
            f"--objective.contrastive_weight {self._contrastive_weight:g} compares the two samples of a pair, and a "
            f"micro-batch has {count}; choose an even --batch.micro, or another number of ranks",
        )
        target = self._target(batch, corruption)
        others = target.view(-1, 2, *target.shape[1:]).flip(1).view_as(target)  # [B, ...] -> [B / 2, 2, ...]
        error = (prediction[:, : target.shape[1]].float() - others).square().mean(dim=1)  # [B, C, H, W] -> [B, H, W]
        mask, levels = self._mask(batch), corruption.levels
        weighted = error if mask is None else error * mask
        return levels.weights[levels.row] * weighted.mean(dim=(1, 2))

    def _mix(self, batch: Batch, levels: Levels | None) -> tuple[Tensor, Levels]:
        """Return ``noisy`` and its levels; without levels the kernel draws them (ddpm, uniform)."""
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
            # The coarser noise is added before rounding.
            dtype=torch.float32 if self.config.multires_noise_iterations else self.dtype,
        )
        return noisy, process.levels(drawn) if levels is None else levels

    def _add_pyramid(self, corruption: Corruption, batch: Batch) -> Corruption:
        """Add the coarser noise (``fastdiff.diffusion.noise_shaping``) to the input and to the target."""
        extra = self._pyramid(batch, corruption.noisy.shape[1:])
        noisy = corruption.noisy + corruption.levels.coefficient(SIGMA) * extra
        correction = corruption.levels.coefficient(TARGET_NOISE) * extra
        return replace(corruption, noisy=noisy.to(self.dtype), correction=correction)

    def _pyramid(self, batch: Batch, shape: torch.Size) -> Tensor:
        iterations, discount = self.config.multires_noise_iterations, self.config.multires_noise_discount
        return self._unit(shape) * pyramid(self.seed, batch.position, shape, iterations, discount)

    def _unit(self, shape: tuple[int, ...]) -> float:
        """Return the scale of the noise of every pixel and of the coarser noise that gives their sum variance 1."""
        return unit_scale(tuple(shape), self.config.multires_noise_iterations, self.config.multires_noise_discount)

    def _rows(self, table: Tensor, unit: float) -> Tensor:
        """Return the rows for the kernels: they add only the noise of every pixel; the correction has the rest."""
        if unit == 1.0:
            return table
        rows = table.clone()
        rows[:, SIGMA] *= unit
        rows[:, TARGET_NOISE] *= unit
        return rows

    def _noise(self, batch: Batch, shape: torch.Size) -> Tensor:
        """Draw the noise of the target again, in fp32: ``[B, *shape]``."""
        noise = self._unit(shape) * normal(self.seed, Stream.NOISE, batch.position, shape)
        if self.config.noise_offset:
            noise += self.config.noise_offset * normal(self.seed, Stream.OFFSET, batch.position, (shape[0], 1, 1))
        if self.config.multires_noise_iterations:
            noise += self._pyramid(batch, shape)
        return noise

    def clean(self, batch: Batch) -> Tensor:
        """Return x0 in fp32, ``[B, C, H, W]``: the latents, or their posterior's sample as in ``add_noise``."""
        latents = dequantised(batch.latents, torch.float32)
        if not self.posterior:
            return latents
        mean, deviation = latents.chunk(2, dim=1)  # [B, 2C, H, W] -> 2 x [B, C, H, W]
        return mean + deviation * normal(self.seed, Stream.POSTERIOR, batch.position, mean.shape[1:])

    def _drop(self, batch: Batch) -> Condition:
        """Replace the condition of some samples by the null (Ho & Salimans 2022, arXiv:2207.12598, algorithm 1)."""
        wanted = {n: value for n, value in batch.condition.items() if self.inputs is None or n in self.inputs}
        if not self._drops:
            return wanted
        dropout: float | Tensor = self.config.condition_dropout
        if self._set_dropouts is not None:
            if batch.data_set is None:
                raise ValueError("data sets have shares of dropped conditions, and the batch does not say its own")
            dropout = self._set_dropouts[batch.data_set]
        drop = uniform(self.seed, Stream.LABEL_DROP, batch.position, 1)[:, 0] < dropout
        return {name: self._dropped(name, value, drop) for name, value in wanted.items()}

    def _made(self, batch: Batch, levels: Levels) -> Condition:
        """Make the inputs that are no columns of the data: dropout's position, small images, the noisy class token."""
        made: Condition = {} if self.routing is None else self.routing.drawn(batch.position)
        if self._token is not None:
            made[TEACHER_TOKEN] = self._token.noisy(batch, levels)
        if self.inputs is not None and "position" in self.inputs:
            made["position"] = batch.position
        if self.low_res_size:
            made["low_res"] = small_images(
                self.clean(batch),
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
