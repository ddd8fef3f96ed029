"""The published training step of DiT (Peebles & Xie 2023; github.com/facebookresearch/DiT, train.py).

fp32 with TF32 on a GPU, no clipping, torch's default AdamW, a per-parameter EMA update, a loss that is read in every
step, and tables that are copied to the device at every use. It trains on latents instead of images and without
``DistributedDataParallel``; both are absent on both sides, or favour DiT. ``best`` adds common optimizations of its
users: autocast where fastdiff computes in 16 bits, compiled blocks where fastdiff compiles, the fused optimizer, one
EMA update for all parameters, a loss that is read only for logging, and tables that stay on the device.
"""

from pathlib import Path

import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.config.run import RunConfig
from fastdiff_bench.measure.session import StepTimer
from fastdiff_bench.measure.workload import Workload
from fastdiff_bench.trainers import plain
from fastdiff_bench.trainers.plain import Plain
from fastdiff_bench.trainers.plain_network import predict
from fastdiff_bench.trainers.plain_torch import of_steps
from fastdiff_bench.trainers.published import Published

_LOG_EVERY = 100


def run(timer: StepTimer, workload: Workload, data: Path, best: bool) -> None:
    """Step until ``Enough``, on the shards in ``data``."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    plain.run(timer, workload, data, best, Dit)


class Dit(Plain):
    """DiT's training step; see ``Peer``.

    Args:
        config: the run, of a DiT.
        device: where it computes.
        best: with the common optimizations.
    """

    def __init__(self, config: RunConfig, device: torch.device, *, best: bool) -> None:
        super().__init__(config, device, best=best)
        objective = of_steps(config.objective)
        # Objectives that their script cannot train (v, a fixed variance, another schedule) are computed as in the other
        # baselines.
        published = not best and Published.trains(objective)
        self._published = Published(objective) if published else None
        if not best:
            self.facts["precision"] = "fp32"
            self._autocast = torch.autocast(device.type, enabled=False)
        self._rate = config.ema.rates[0]
        self._sum: Tensor | float = 0.0
        self._steps = 0

    def loss(self, clean: Tensor, noise: Tensor, time: Tensor, condition: Condition) -> Tensor:
        """See ``Peer``."""
        if self._published is None:
            return super().loss(clean, noise, time, condition)
        return self._published.loss(lambda noisy, t: predict(self.model, noisy, t, condition), clean, noise, time)

    def update(self, loss: Tensor) -> None:
        """See ``Peer``."""
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        if self._best:
            self._ema.update_parameters(self.model)
        else:
            self._update_average()
        self._steps += 1
        self._sum += loss.detach() if self._best else loss.item()
        if self._steps % _LOG_EVERY == 0:
            print(f"step {self._steps}: loss {float(self._sum) / _LOG_EVERY:.4f}")
            self._sum = 0.0

    @torch.no_grad()
    def _update_average(self) -> None:
        for average, weight in zip(self.averages, self.model.parameters(), strict=True):
            average.mul_(self._rate).add_(weight, alpha=1 - self._rate)
