"""How the timestep of a training sample is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from fastdiff.randomness import Stream, uniform


def uniform_timesteps(seed: int, position: Tensor, timesteps: int) -> Tensor:
    """Each timestep equally often (Ho et al. 2020, arXiv:2006.11239, algorithm 1).

    Args:
        seed: seed of the run, in [0, 2**64).
        position: ``[B]`` int64 positions in the run.
        timesteps: number of timesteps T, at most 2**24.

    Returns:
        ``[B]`` int64 in [0, T), on the device of ``position``.
    """
    share = uniform(seed, Stream.TIMESTEP, position, 1)[:, 0]
    # The product of the largest fp32 below 1 and T <= 2**24 rounds to a number below T, so it needs no clamp.
    return (share * timesteps).floor().to(torch.int64)
