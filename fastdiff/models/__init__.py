"""The networks; a configuration and a seed decide every initial weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastdiff.config import DiTConfig
from fastdiff.models.dit import DiT
from fastdiff.models.embeddings import position_table
from fastdiff_kernels.attention import AttentionBackend

__all__ = ["build_model", "load_model"]


def build_model(
    config: DiTConfig, *, recompute: bool = False, attention: AttentionBackend = "auto", seed: int = 0
) -> DiT:
    """A DiT whose initial weights are a pure function of ``config`` and ``seed``.

    The global random state of torch is left as it was, so building a model before or after anything else
    changes nothing. The weights are fp32 and lie on the CPU; under ``torch.device("meta")`` they have shapes alone.

    Args:
        config: Shape of the network.
        recompute: Recompute each block in the backward pass instead of storing its activations.
        attention: Implementation of attention, see ``fastdiff_kernels.attention``.
        seed: Any integer; its low 64 bits count.

    Raises:
        ValueError: Called under another default device, whose generator would draw other weights.
    """
    device = torch.get_default_device()
    if device.type not in ("cpu", "meta"):
        raise ValueError(f"build_model under the default device {device}: build on the CPU and move the model")
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would also re-seed the CUDA generators, which the fork does not restore.
        torch.default_generator.manual_seed(seed & (2**64 - 1))
        return DiT(config, recompute=recompute, attention=attention)


def load_model(
    config: DiTConfig,
    weights: Mapping[str, Tensor],
    *,
    recompute: bool = False,
    attention: AttentionBackend = "auto",
) -> DiT:
    """A DiT with given parameters, on their device; nothing is initialised first.

    Args:
        config: Shape of the network.
        weights: Every parameter by name; not the position table, which the shape decides.
        recompute: As in ``build_model``.
        attention: As in ``build_model``.

    Raises:
        RuntimeError: A parameter is missing, unknown or of another shape.
    """
    with torch.device("meta"):
        model = DiT(config, recompute=recompute, attention=attention)
    device = next(iter(weights.values())).device
    table = position_table(config.hidden, config.size // config.patch).to(device)
    model.load_state_dict({**weights, "pos_embed": table}, assign=True)
    return model
