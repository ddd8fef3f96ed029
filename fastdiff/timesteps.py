"""How the timestep of a training sample is drawn."""

from __future__ import annotations

from torch import Tensor

from fastdiff.randomness import Stream, uniform
from fastdiff_kernels.noising import uniform_time


def uniform_timesteps(seed: int, position: Tensor, timesteps: int) -> Tensor:
    """Each timestep equally often (Ho et al. 2020, arXiv:2006.11239, algorithm 1).

    Args:
        seed: seed of the run, in [0, 2**64).
        position: ``[B]`` int64 positions in the run.
        timesteps: number of timesteps T, at most 2**24.

    Returns:
        ``[B]`` int64 in [0, T), on the device of ``position``.
    """
    return uniform_time(uniform(seed, Stream.TIMESTEP, position, 1)[:, 0], timesteps)
