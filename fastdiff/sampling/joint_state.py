"""What a solver takes from noise to data: latents, or latents and the class token of a teacher as one vector."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fastdiff.batch import split
from fastdiff.errors import require


@dataclass(frozen=True, slots=True)
class JointState:
    """Latents ``[B, C, H, W]``; with a class token of a teacher ``[B, C * H * W + D]``, the token behind the latents.

    A solver treats all numbers alike, so that the token takes the steps of the latents.
    """

    latents: tuple[int, int, int]
    """``(C, H, W)``."""
    token: int = 0
    """D, the width of the token; 0: none."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one state."""
        return (prod(self.latents) + self.token,) if self.token else self.latents

    def guided(self, channels: int | None) -> int:
        """Return the leading entries of a state's first dimension with guidance, by channels of the latents; None: all.

        The token is guided if all channels are.
        """
        if not self.token or channels is None:
            return channels or self.shape[0]
        return channels * prod(self.latents[1:])

    def denoiser(self, model: Callable[..., Any]) -> Callable[..., Tensor]:
        """Return the network as a function from states to predictions of states."""
        if not self.token:
            return model

        def joined(state: Tensor, time: Tensor, **condition: Tensor) -> Tensor:
            latents, token = state.tensor_split((prod(self.latents),), dim=1)
            found = split(model(latents.reshape(-1, *self.latents), time, teacher_token=token, **condition))
            parts = (found.latents, found.token)
            return torch.cat([part.float().flatten(1) for part in parts if part is not None], dim=1)

        return joined

    def noise(self, drawn: Tensor, *, coupled: bool) -> Tensor:
        """Return the state to begin with, of ``drawn`` standard normal numbers.

        Args:
            drawn: ``[B, *shape]``.
            coupled: whether the token begins as the mean of the latents' noise over the pixels, as in RiT's sampling:
                its standard deviation is then ``1 / sqrt(H * W)``, not 1 as in training.

        Raises:
            ConfigError: ``coupled`` without a token, or with one of another width than the latents have channels.
        """
        if not coupled:
            return drawn
        channels = self.latents[0]
        require(
            self.token == channels,
            f"--coupled-noise: the class token of a teacher has the width {self.token}, expected that of the latents, "
            f"{channels} channels; leave it out",
        )
        latents = self.without_token(drawn)
        return torch.cat([latents.flatten(1), latents.mean(dim=(2, 3))], dim=1)

    def without_token(self, state: Tensor) -> Tensor:
        """Return the latents ``[B, C, H, W]`` of a state."""
        return state[:, : prod(self.latents)].reshape(-1, *self.latents) if self.token else state
