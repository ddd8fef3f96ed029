"""The training step of diffusers' examples/text_to_image/train_text_to_image.py, built from its public parts.

As published: images are decoded in the training process (no workers, its default), the autoencoder and the text encoder
run in every step, and the loss is read twice per step. Its ``--mixed_precision``, which the command in its README sets,
is the precision of the run: autocast for the UNet, the frozen parts in 16 bits. ``best`` uses latents and embeddings
from memory, compilation where fastdiff compiles, channels_last, the fused optimizer, and one EMA update for all
parameters. Attention is torch's SDPA in both. The script drops no captions. It is started for one device, without a
distributed wrapper.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import PREDICTION_TYPES, ObjectiveConfig
from fastdiff.config.sections.timesteps import TimestepConfig
from fastdiff.diffusion.levels import GAMMA
from fastdiff.diffusion.schedules import betas
from fastdiff.training.optimizer.build import build_lr_schedule
from fastdiff_bench import BenchError
from fastdiff_bench.measure.session import Fact, StepTimer
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.trainers import encoders
from fastdiff_bench.trainers.plain_network import compiled, network
from fastdiff_bench.trainers.plain_torch import Samples, of_steps, train, untrained
from fastdiff_bench.trainers.scripts import diffusers

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Launcher variables that give a process its rank; with them accelerate would wrap the network for many."""


def run(timer: StepTimer, workload: Workload, data: Path, best: bool) -> None:
    """Step until ``Enough``, on the images in ``data``, or with ``best`` on the shards there."""
    for name in LAUNCHER:
        os.environ.pop(name, None)
    config = workload.config(data, data)
    peer = TextToImage(config, timer.device, best=best)
    batch = config.batch.samples
    if best:
        samples: Samples | Online = Samples(data, batch, 0.0, None, timer.device)
    else:
        samples = Online(timer, peer.accelerator, config.model, batch, data)
    train(timer, peer, samples, of_steps(config.objective).timesteps)


def not_in_script(objective: ObjectiveConfig, timesteps: TimestepConfig) -> list[str]:
    """Return the options of a run that the script does not support, as flags; empty: all are supported."""
    flags = untrained(objective, timesteps)
    if objective.weighted not in ("none", "min_snr"):
        flags.append(f"--objective.weighting {objective.weighted}")
    return flags


class TextToImage:
    """Training step of diffusers' script; see ``Peer``."""

    def __init__(self, config: RunConfig, device: torch.device, *, best: bool) -> None:
        from accelerate import Accelerator  # type: ignore[import-untyped,unused-ignore]
        from diffusers import DDPMScheduler, UNet2DConditionModel
        from diffusers.training_utils import EMAModel

        assert isinstance(config.model, UNetConfig)
        self._clip, self._batch, objective = config.optim.clip, config.batch.samples, of_steps(config.objective)
        precision = config.performance.precision
        self.accelerator: Any = Accelerator(
            cpu=device.type == "cpu", mixed_precision={"fp32": "no"}.get(precision, precision)
        )
        kind = PREDICTION_TYPES[objective.predicted]
        self._scheduler: Any = DDPMScheduler(
            num_train_timesteps=objective.timesteps, trained_betas=betas(objective).tolist(), prediction_type=kind
        )
        self._gamma = (objective.min_snr_gamma or GAMMA["min_snr"]) if objective.weighted == "min_snr" else None
        unet = network(config, device, best=best)
        self._ema: Any = EMAModel(
            unet.parameters(), decay=config.ema.rates[0], model_cls=UNet2DConditionModel, model_config=unet.config,
            foreach=best,
        )  # fmt: skip
        optim = config.optim
        optimizer = torch.optim.AdamW(unet.parameters(), **optim.hyper_parameters(), fused=best or None)
        schedule = build_lr_schedule(optimizer, optim, config.steps)
        self.model, self._optimizer, self._schedule = self.accelerator.prepare(unet, optimizer, schedule)
        self.facts: dict[str, Fact] = {
            "precision": precision, "compile": best and compiled(self.model, config.performance, device),
            "channels_last": best, "fused": best, "foreach": best,
        }  # fmt: skip
        self._ema.to(self.accelerator.device)

    def loss(self, clean: Tensor, noise: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """See ``Peer``."""
        noisy = self._scheduler.add_noise(clean, noise, time)
        prediction = self.model(noisy, time, condition["context"], return_dict=False)[0]
        target = self._target(clean, noise, time)
        if self._gamma is None:
            return F.mse_loss(prediction.float(), target.float())
        by_sample = F.mse_loss(prediction.float(), target.float(), reduction="none").mean(dim=(1, 2, 3))
        return (by_sample * self._weights(time)).mean()

    def update(self, loss: Tensor) -> None:
        """See ``Peer``."""
        shown = self.accelerator.gather(loss.detach().repeat(self._batch)).mean().item()
        self.accelerator.backward(loss)
        if self._clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        self._ema.step(self.model.parameters())
        self.accelerator.log({"train_loss": shown, "step_loss": loss.detach().item()})

    @property
    def averages(self) -> list[Tensor]:
        """See ``Peer``."""
        return list(self._ema.shadow_params)

    def _target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        kind = self._scheduler.config.prediction_type
        if kind == "v_prediction":
            velocity: Tensor = self._scheduler.get_velocity(clean, noise, time)
            return velocity
        if kind not in ("epsilon", "sample"):
            raise BenchError(f"prediction type {kind}: diffusers' script does not support this")
        return noise if kind == "epsilon" else clean

    def _weights(self, time: Tensor) -> Tensor:
        """Return the Min-SNR weights (Hang et al. 2023, arXiv:2303.09556) for the prediction type, ``[B]``."""
        from diffusers.training_utils import compute_snr

        ratio: Tensor = compute_snr(self._scheduler, time)
        divisor = {"epsilon": ratio, "v_prediction": ratio + 1.0, "sample": torch.ones_like(ratio)}
        return ratio.clamp(max=self._gamma) / divisor[self._scheduler.config.prediction_type]


class Online:
    """Images decoded and encoded, and captions embedded, in every step; replaces ``Samples``."""

    kind = "images decoded and encoded, captions embedded in every step"

    def __init__(self, timer: StepTimer, accelerator: Any, network: ModelConfig, batch: int, folder: Path) -> None:
        assert isinstance(network, UNetConfig)
        tokenizer = encoders.tokenizer()
        self._dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision, torch.float32)
        parts = encoders.autoencoder(network), encoders.text_encoder(network, len(tokenizer))
        self._vae, self._text = (part.to(accelerator.device, self._dtype).requires_grad_(False) for part in parts)
        loader = diffusers.loader(folder, encoders.FACTOR * network.size, batch, tokenizer)
        self._batches = diffusers.endless(accelerator.prepare(loader))
        self._timer = timer

    def next(self) -> tuple[Tensor, Condition]:
        """Return sampled latents ``[B, C, H, W]`` and ``context [B, 77, D]``, in the precision of the run."""
        with self._timer.phase("data"):
            batch = next(self._batches)
        with self._timer.phase("encode"):
            latents = self._vae.encode(batch["pixel_values"].to(self._dtype)).latent_dist.sample()
            latents = latents * self._vae.config.scaling_factor
            context = self._text(batch["input_ids"], return_dict=False)[0]
        return latents, {"context": context}
