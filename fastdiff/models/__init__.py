"""The networks; a configuration and a seed decide every initial weight."""

from __future__ import annotations

import torch

from fastdiff.config import DiTConfig
from fastdiff.models.dit import DiT

__all__ = ["build_model"]


def build_model(config: DiTConfig, *, recompute: bool = False, seed: int = 0) -> DiT:
    """A DiT whose initial weights are a pure function of ``config`` and ``seed``.

    The global random state of torch is left as it was, so building a model before or after anything else
    changes nothing. The weights are fp32 and lie on the CPU unless the call stands in a ``torch.device``
    context (``meta`` gives the shapes alone).

    Args:
        config: Shape of the network.
        recompute: Recompute each block in the backward pass instead of storing its activations.
        seed: Any integer; its low 64 bits count.
    """
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would also re-seed the CUDA generators, which the fork does not restore.
        torch.default_generator.manual_seed(seed & (2**64 - 1))
        return DiT(config, recompute=recompute)
