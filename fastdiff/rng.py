"""Random numbers of a run, as a pure function of (seed, stream, position).

Position n counts the training samples of the whole run, so a number does not depend on the rank, the number of ranks,
the batch size or a resume. Each purpose has its own stream, so two purposes never share numbers.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from numpy.random import SeedSequence
from torch import Tensor

from fastdiff_kernels import philox


class Stream(IntEnum):
    """Purpose of a random number. The values are part of the definition of a run: never renumber them."""

    TIMESTEP = 0
    NOISE = 1
    POSTERIOR = 2
    LABEL_DROP = 3
    FLIP = 4
    PERTURBATION = 5
    OFFSET = 6
    CAPTION = 7
    CROP = 8
    MULTIRES = 9
    LIKELIHOOD = 10
    DROPOUT = 11
    """Dropout of block 0 of a network; the other blocks use ``dropout_stream``."""
    LOW_RES = 12
    LOW_RES_LEVEL = 13
    TEACHER_TOKEN = 14
    ROUTING = 15
    PATH_DROP = 16
    """Keyed by optimizer step, not by sample."""


_NAMED = 256
"""Room for the streams above; the stream of a block is one of these plus a multiple of this number."""


def dropout_stream(block: int) -> int:
    """Return the dropout stream of a residual block, counted from 0 in the order of the forward pass.

    It is ``DROPOUT + 256 * block``: no two blocks share a dropout mask, and none shares numbers with another purpose.
    """
    return Stream.DROPOUT + _NAMED * block


def seed_initial_values(seed: int) -> None:
    """Seed torch's default generator of the CPU, from which initial weights are drawn; the low 64 bits count.

    The generator, MT19937, takes 32 bits and drops the others, so larger seeds are hashed. ``torch.manual_seed`` would
    also seed the CUDA generators, which ``torch.random.fork_rng(devices=[])`` does not restore.
    """
    seed &= 2**64 - 1
    torch.default_generator.manual_seed(seed if seed < 2**32 else int(SeedSequence(seed).generate_state(1)[0]))


def uniform(seed: int, stream: Stream, position: Tensor, count: int) -> Tensor:
    """Uniform numbers in [0, 1).

    Args:
        seed: seed of the run, in [0, 2**64).
        stream: purpose of the numbers.
        position: ``[B]`` int64 positions in the run.
        count: numbers per position.

    Returns:
        ``[B, count]`` fp32 on the device of ``position``.

    Raises:
        ValueError: see ``fastdiff_kernels.philox.uniform``.
    """
    return philox.uniform(seed, int(stream), position, count)


def normal(seed: int, stream: Stream, position: Tensor, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers.

    Args:
        seed: seed of the run, in [0, 2**64).
        stream: purpose of the numbers.
        position: ``[B]`` int64 positions in the run.
        shape: shape of the numbers of one position, in row-major order.

    Returns:
        ``[B, *shape]`` fp32 on the device of ``position``.

    Raises:
        ValueError: see ``fastdiff_kernels.philox.normal``.
    """
    flat = philox.normal(seed, int(stream), position, math.prod(shape))
    return flat.view(position.shape[0], *shape)
