"""The timestep of a training sample."""

from torch import Tensor

from fastdiff.rng import Stream, uniform
from fastdiff_kernels.noising import uniform_time


def uniform_timesteps(seed: int, position: Tensor, timesteps: int) -> Tensor:
    """``[B]`` int64 timesteps of ``[B]`` positions in the run with ``seed``."""
    return uniform_time(uniform(seed, Stream.TIMESTEP, position, 1)[:, 0], timesteps)
