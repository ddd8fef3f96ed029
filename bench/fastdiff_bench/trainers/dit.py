"""The published training step of DiT (Peebles & Xie 2023; github.com/facebookresearch/DiT, train.py).

fp32 with TF32 on a GPU, no clipping, torch's default AdamW, a per-parameter EMA update, a loss that is read in every
step, and tables that are copied to the device at every use. It trains on latents instead of images and without
``DistributedDataParallel``; both are absent on both sides, or favour DiT. ``best`` adds common optimizations of its
users: autocast where fastdiff computes in 16 bits, compiled blocks where fastdiff compiles, the fused optimizer, one
EMA update for all parameters, a loss that is read only for logging, and tables that stay on the device.
"""

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff_bench.measure.session import Fact, StepTimer
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.trainers.plain_network import compiled, network
from fastdiff_bench.trainers.plain_torch import Noise, Samples, of_steps, train
from fastdiff_bench.trainers.published import Published

_LOG_EVERY = 100


def run(timer: StepTimer, workload: Workload, data: Path, best: bool) -> None:
    """Step until ``Enough``, on the shards in ``data``."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    config = workload.config(data, data)
    assert isinstance(config.model, DiTConfig)
    dropout, null = config.objective.condition_dropout, config.model.classes
    samples = Samples(data, config.batch.samples, dropout, null, timer.device)
    train(timer, Dit(config, timer.device, best=best), samples, of_steps(config.objective).timesteps)


class Dit:
    """DiT's training step; see ``Peer``."""

    def __init__(self, config: RunConfig, device: torch.device, *, best: bool) -> None:
        self._best, self._rate = best, config.ema.rates[0]
        objective = of_steps(config.objective)
        self._noise = Noise(objective, device)
        # Objectives that their script cannot train (v, a fixed variance, another schedule) are computed as in the other
        # baselines.
        published = not best and Published.trains(objective)
        self._published = Published(objective) if published else None
        self.model = network(config, device, best=best)
        self._average = deepcopy(self.model).requires_grad_(False).eval()
        precision = config.performance.precision if best else "fp32"
        self.facts: dict[str, Fact] = {
            "precision": precision, "compile": best and compiled(self.model, config.performance, device),
            "channels_last": False, "fused": best, "foreach": best,
        }  # fmt: skip
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        optim = config.optim
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **optim.hyper_parameters(), fused=best or None)
        self._sum: Tensor | float = 0.0
        self._steps = 0

    def loss(self, clean: Tensor, noise: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """See ``Peer``."""
        label = condition["label"]
        if self._published is not None:
            return self._published.loss(lambda noisy, time: self.model(noisy, time, label), clean, noise, time)
        noisy = self._noise.noisy(clean, noise, time)
        with self._autocast:
            prediction = self.model(noisy, time, label)
        return self._noise.loss(prediction, clean, noise, time)

    def update(self, loss: Tensor) -> None:
        """See ``Peer``."""
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._update_average()
        self._steps += 1
        self._sum += loss.detach() if self._best else loss.item()
        if self._steps % _LOG_EVERY == 0:
            print(f"step {self._steps}: loss {float(self._sum) / _LOG_EVERY:.4f}")
            self._sum = 0.0

    @torch.no_grad()
    def _update_average(self) -> None:
        averages: list[Tensor] = list(self._average.parameters())
        weights: list[Tensor] = list(self.model.parameters())
        if self._best:
            torch._foreach_lerp_(averages, weights, 1 - self._rate)
            return
        for average, weight in zip(averages, weights, strict=True):
            average.mul_(self._rate).add_(weight, alpha=1 - self._rate)

    @property
    def averages(self) -> list[Tensor]:
        """See ``Peer``."""
        return list(self._average.parameters())
