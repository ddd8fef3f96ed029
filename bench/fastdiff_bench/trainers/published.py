"""Noise and loss of DiT's training script (github.com/facebookresearch/DiT, ``create_diffusion``).

Its tables are NumPy arrays in float64, copied to the device at every use: 18 times per step, 4 of them for a posterior
mean that this loss does not use, and once more for the timestep numbers.
"""

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.config.sections.objective import DdpmConfig
from fastdiff.diffusion.schedules import Schedule
from fastdiff_bench.trainers import bound
from fastdiff_bench.trainers.plain_torch import log_posterior_variance


class Published:
    """Counterpart of ``plain_torch.Noise``, for the objectives that it ``trains``."""

    def __init__(self, config: DdpmConfig) -> None:
        exact = Schedule.build(config, "cpu", torch.float64)
        tables = {
            "alpha": exact.alpha,
            "sigma": exact.sigma,
            "clean of noisy": 1.0 / exact.alpha,
            "clean of noise": exact.sigma / exact.alpha,
            "posterior of clean": exact.posterior_clean,
            "posterior of noisy": exact.posterior_noisy,
            "posterior variance": exact.posterior_variance,
            "log posterior variance": log_posterior_variance(exact),
            "log beta": exact.beta.log(),
        }
        self._tables: dict[str, npt.NDArray[Any]] = {name: table.numpy() for name, table in tables.items()}
        self._numbers = list(range(config.timesteps))

    @staticmethod
    def trains(config: DdpmConfig) -> bool:
        """Return whether their script supports this objective, for a run with plain noise."""
        noise = config.schedule, config.timesteps, config.zero_terminal_snr
        loss = config.predicted, config.variance, config.loss, config.weighted
        return noise == ("linear", 1000, False) and loss == ("epsilon", "learned_range", "mse", "none")

    def loss(self, model: Callable[[Tensor, Tensor], Tensor], clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Return the mean of ``terms``' loss, a scalar."""
        return self.terms(model, clean, noise, time)["loss"].mean()

    def terms(
        self, model: Callable[[Tensor, Tensor], Tensor], clean: Tensor, noise: Tensor, time: Tensor
    ) -> dict[str, Tensor]:
        """Return ``mse``, the squared error of the noise, ``vb``, the bound of the variance, and ``loss``, their sum.

        Args:
            model: ``noisy [B, C, H, W], time [B] -> [B, 2C, H, W]`` fp32.
            clean: ``[B, C, H, W]``.
            noise: the same.
            time: ``[B]`` int64.

        Returns:
            ``[B]`` fp32 each.
        """
        noisy = self._at("alpha", time, clean) * clean + self._at("sigma", time, clean) * noise
        told = torch.tensor(self._numbers, device=time.device, dtype=time.dtype)[time]
        predicted, variance = model(noisy, told).chunk(2, dim=1)
        divergence = self._bound(torch.cat([predicted.detach(), variance], dim=1), clean, noisy, time)
        self._posterior(clean, noisy, time)  # the target of another prediction type, which their script also computes
        squared = ((noise - predicted) ** 2).mean(dim=(1, 2, 3))
        return {"loss": squared + divergence, "vb": divergence, "mse": squared}

    def _bound(self, prediction: Tensor, clean: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        true, _, log_variance = self._posterior(clean, noisy, time)
        predicted, variance = prediction.chunk(2, dim=1)
        smallest, largest = (self._at(name, time, clean) for name in ("log posterior variance", "log beta"))
        estimated = bound.log_variance(variance, smallest, largest)
        estimate = self._at("clean of noisy", time, clean) * noisy - self._at("clean of noise", time, clean) * predicted
        mean, _, _ = self._posterior(estimate, noisy, time)
        divergence = bound.divergence(true - mean, log_variance, estimated).mean(dim=(1, 2, 3))
        decoder = bound.decoder(clean, clean - mean, estimated).mean(dim=(1, 2, 3))
        return torch.where(time == 0, decoder, divergence)

    def _posterior(self, clean: Tensor, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, variance and log variance of the posterior."""
        names = ("posterior of clean", "posterior of noisy", "posterior variance", "log posterior variance")
        of_clean, of_noisy, variance, log_variance = (self._at(name, time, clean) for name in names)
        return of_clean * clean + of_noisy * noisy, variance, log_variance

    def _at(self, name: str, time: Tensor, like: Tensor) -> Tensor:
        """Return ``[B, C, H, W]``: the table's value of a sample in all of its elements."""
        found = torch.from_numpy(self._tables[name]).to(time.device)[time].float()
        return found.view(-1, 1, 1, 1) + torch.zeros(like.shape, device=time.device)
