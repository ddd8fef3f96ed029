"""openai/improved-diffusion's scripts/image_train.py: its network, its loss, and its step tensor by tensor, in fp32.

Nichol & Dhariwal 2021, arXiv:2102.09672. The images are decoded by one worker process, the default of its loader.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.sections.objective import DdpmConfig
from fastdiff_bench.measure.session import StepTimer
from fastdiff_bench.trainers.published import Published
from fastdiff_bench.trainers.scripts.iddpm_network import UNet

_QUARTILES = 4


def run(timer: StepTimer, network: AdmConfig, objective: DdpmConfig, images: Path, batch: int) -> None:
    """Step until ``Enough``."""
    script = _Script(network, objective)
    loader = DataLoader(_Images(images, network.size), batch, shuffle=True, num_workers=1, drop_last=True)
    batches = _endless(loader)
    first = next(batches)  # starts the worker
    timer.ready()
    script.step(first)
    timer.after_step()
    for pixels in batches:
        script.step(pixels)
        timer.after_step()


class _Script:
    _log_interval, _rate = 10, 0.9999

    def __init__(self, network: AdmConfig, objective: DdpmConfig) -> None:
        self._model = UNet(network).train()
        self._timesteps, self._loss = objective.timesteps, Published(objective)
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-4, weight_decay=0.0)
        self._average = [p.detach().clone() for p in self._parameters]
        self._sums: defaultdict[str, list[float]] = defaultdict(list)
        self._steps = 0

    def step(self, pixels: Tensor) -> None:
        for p in self._parameters:
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
        time, weights = self._drawn(len(pixels))
        terms = self._loss.terms(self._told, pixels, torch.randn_like(pixels), time)
        (terms["loss"] * weights).mean().backward()  # type: ignore[no-untyped-call]
        for name, values in terms.items():
            self._log(name, values * weights, time)
        self._update()
        self._steps += 1
        if self._steps % self._log_interval == 0:
            self._sums.clear()

    def _drawn(self, count: int) -> tuple[Tensor, Tensor]:
        chances = np.ones([self._timesteps]) / self._timesteps
        drawn = np.random.choice(  # noqa: NPY002 - as published
            self._timesteps, size=(count,), p=chances
        )
        weights = 1 / (self._timesteps * chances[drawn])
        return torch.from_numpy(drawn).long(), torch.from_numpy(weights).float()

    def _told(self, noisy: Tensor, time: Tensor) -> Tensor:
        told: Tensor = self._model(noisy, time.float() * (1000.0 / self._timesteps))
        return told

    def _log(self, name: str, values: Tensor, time: Tensor) -> None:
        self._sums[name].append(values.mean().item())
        for step, value in zip(time.cpu().numpy(), values.detach().cpu().numpy(), strict=True):
            self._sums[f"{name}_q{int(_QUARTILES * step / self._timesteps)}"].append(value.item())

    def _update(self) -> None:
        squares = 0.0
        for p in self._parameters:
            assert p.grad is not None
            squares += (p.grad**2).sum().item()
        self._sums["grad_norm"].append(math.sqrt(squares))
        self._optimizer.step()
        for average, p in zip(self._average, self._parameters, strict=True):
            average.mul_(self._rate).add_(p.detach(), alpha=1 - self._rate)


class _Images(Dataset[Tensor]):
    """Images resized and cropped as in the script, in [-1, 1]."""

    def __init__(self, folder: Path, side: int) -> None:
        self._files, self._side = sorted(folder.iterdir()), side

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> Tensor:
        with self._files[number].open("rb") as file:
            image = Image.open(file)
            image.load()
        scale = self._side / min(image.size)
        size = (round(image.size[0] * scale), round(image.size[1] * scale))
        pixels = np.array(image.resize(size, Image.Resampling.BICUBIC).convert("RGB"))
        top, left = ((n - self._side) // 2 for n in pixels.shape[:2])
        cropped = pixels[top : top + self._side, left : left + self._side]
        return torch.from_numpy(np.transpose(cropped.astype(np.float32) / 127.5 - 1, [2, 0, 1]).copy())


def _endless(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from loader
