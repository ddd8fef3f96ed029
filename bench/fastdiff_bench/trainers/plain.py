"""A loop of plain PyTorch without DeepSpeed: autocast, AdamW, clipping, and EMA by ``torch.optim.swa_utils``.

It is the usual implementation: optimizer and EMA with torch's defaults, a DiT in plain torch or diffusers' UNet, in the
precision of the run. ``best`` adds the fused optimizer, EMA and clipping over all parameters at once, a channels_last
UNet, and compilation where fastdiff compiles.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from fastdiff.batch import Condition
from fastdiff.config.networks.dit import DiTConfig
from fastdiff.config.run import RunConfig
from fastdiff.training.optimizer.build import build_lr_schedule
from fastdiff_bench.measure.session import Fact, StepTimer
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.trainers.plain_network import compiled, network, predict
from fastdiff_bench.trainers.plain_torch import Noise, Samples, of_steps, train


class Plain:
    """Plain PyTorch's training step; see ``Peer``."""

    def __init__(self, config: RunConfig, device: torch.device, *, best: bool) -> None:
        self._config, self._best = config, best
        self._noise = Noise(of_steps(config.objective), device)
        self.model = network(config, device, best=best)
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.performance.precision == "bf16")
        optim, rate = config.optim, config.ema.rates[0]
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **optim.hyper_parameters(), fused=best or None)
        self._schedule = build_lr_schedule(self._optimizer, optim, config.steps)
        one_by_one = None if best else get_ema_avg_fn(rate)  # type: ignore[no-untyped-call]
        together = get_ema_multi_avg_fn(rate) if best else None  # type: ignore[no-untyped-call]
        self._ema = AveragedModel(self.model, avg_fn=one_by_one, multi_avg_fn=together)
        self._ema.update_parameters(self.model)  # the first update is a copy
        self.facts: dict[str, Fact] = {
            "precision": config.performance.precision,
            "compile": best and compiled(self.model, config.performance, device),
            "channels_last": best and not isinstance(config.model, DiTConfig), "fused": best, "foreach": best,
        }  # fmt: skip

    def loss(self, clean: Tensor, noise: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """See ``Peer``."""
        noisy = self._noise.noisy(clean, noise, time)
        with self._autocast:
            prediction = predict(self.model, noisy, time, condition)
        return self._noise.loss(prediction, clean, noise, time)

    def update(self, loss: Tensor) -> None:
        """See ``Peer``."""
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self._config.optim.clip:
            clip_grad_norm_(self.model.parameters(), self._config.optim.clip, foreach=self._best or None)
        self._optimizer.step()
        self._schedule.step()
        self._ema.update_parameters(self.model)

    @property
    def averages(self) -> list[Tensor]:
        """See ``Peer``."""
        return list(self._ema.module.parameters())


def run(timer: StepTimer, workload: Workload, data: Path, best: bool, kind: type[Plain] = Plain) -> None:
    """Step until ``Enough``, on the shards in ``data``."""
    config = workload.config(data, data)
    null = config.model.classes if isinstance(config.model, DiTConfig) else None
    samples = Samples(data, config.batch.samples, config.objective.condition_dropout, null, timer.device)
    train(timer, kind(config, timer.device, best=best), samples, of_steps(config.objective).timesteps)
