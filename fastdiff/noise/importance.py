"""How large the loss of each timestep was of late, and how often the timesteps should be drawn for that.

Nichol & Dhariwal 2021 (arXiv:2102.09672), section 3.3: the gradient is least noisy if timesteps are drawn in proportion
to the root of their mean squared loss, and weighted by the inverse.
"""

from __future__ import annotations

import torch
from torch import Tensor

HISTORY = 10
"""Losses that are kept of each timestep (ibid.)."""
UNIFORM_PROB = 0.001
"""Share of the draws that is spread evenly, so that no timestep is ever forgotten, as in the paper's code."""


class LossHistory:
    """The last losses of each timestep, on the device: nothing here waits for it.

    Args:
        timesteps: number of timesteps T.
        device: where the losses are.
    """

    def __init__(self, timesteps: int, device: torch.device | str) -> None:
        # One row more than there are timesteps: what is not kept goes there, so that every shape is static.
        self._losses = torch.zeros(timesteps + 1, HISTORY, device=device)
        self._taken = torch.zeros(timesteps + 1, dtype=torch.int64, device=device)

    def take(self, timestep: Tensor, losses: Tensor) -> None:
        """Take in losses, the oldest first; those that are not finite are passed over.

        Args:
            timestep: ``[N]`` int64.
            losses: ``[N]`` fp32.
        """
        nowhere = len(self._taken) - 1
        timestep, order = torch.where(losses.isfinite(), timestep, nowhere).sort(stable=True)
        # Losses of one timestep are neighbours now, still in their order: each learns how many came before and after.
        first = torch.searchsorted(timestep, timestep)
        end = torch.searchsorted(timestep, timestep, right=True)
        place = torch.arange(len(timestep), device=timestep.device)
        row = torch.where(end - place <= HISTORY, timestep, nowhere)
        column = (self._taken[timestep] + place - first) % HISTORY
        self._losses.view(-1).scatter_(0, row * HISTORY + column, losses[order])
        self._taken.scatter_add_(0, timestep, torch.ones_like(timestep))

    def weights(self) -> Tensor:
        """How often each timestep should be drawn, up to a factor: ``[T]`` fp64, equal until all histories are full."""
        root = self._losses[:-1].double().square().mean(dim=1).sqrt()
        # If no timestep has a loss, the equal shares are left.
        learned = (1.0 - UNIFORM_PROB) * root / root.sum().clamp(min=1e-300) + UNIFORM_PROB / len(root)
        return torch.where((self._taken[:-1] >= HISTORY).all(), learned, 1.0 / len(root))

    def state(self) -> dict[str, Tensor]:
        """``history [T, HISTORY]`` fp32, a ring in which ``count [T]`` int64, losses taken so far, tells the oldest."""
        return {"history": self._losses[:-1], "count": self._taken[:-1]}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on with ``state``; start anew without one, or with that of another number of timesteps."""
        for name, values in self.state().items():
            if name in state and state[name].shape == values.shape:
                values.copy_(state[name])
            else:
                values.zero_()
