"""The networks; a configuration and a seed decide every initial weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from fastdiff.model_config import AdmConfig, DiTConfig, ModelConfig
from fastdiff.models.dit import DiT
from fastdiff.models.embeddings import position_table
from fastdiff_kernels.names import AttentionBackend

if TYPE_CHECKING:
    from fastdiff.models.adm import AdmUNet
    from fastdiff.models.unet import UNet

__all__ = ["Model", "build_model", "load_model"]

Model: TypeAlias = "DiT | UNet | AdmUNet"


def build_model(
    config: ModelConfig, *, recompute: bool = False, attention: AttentionBackend = "auto", seed: int = 0
) -> Model:
    """A network whose initial weights are a pure function of ``config`` and ``seed``.

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
        return _new(config, recompute, attention, seed)


def load_model(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    recompute: bool = False,
    attention: AttentionBackend = "auto",
    seed: int = 0,
) -> Model:
    """A network with given parameters, on their device; nothing is initialised first.

    Args:
        config: Shape of the network.
        weights: Every parameter by name; not the position table of a DiT, which the shape decides.
        recompute: As in ``build_model``.
        attention: As in ``build_model``.
        seed: Key of a dropout.

    Raises:
        RuntimeError: A parameter is missing, unknown or of another shape.
    """
    with torch.device("meta"):
        model = _new(config, recompute, attention, seed)
    buffers = {}
    if isinstance(config, DiTConfig):
        table = position_table(config.hidden, config.size // config.patch)
        buffers["pos_embed"] = table.to(next(iter(weights.values())).device)
    model.load_state_dict({**weights, **buffers}, assign=True)
    return model


def _new(config: ModelConfig, recompute: bool, attention: AttentionBackend, seed: int) -> Model:
    if isinstance(config, DiTConfig):
        return DiT(config, recompute=recompute, attention=attention)
    if isinstance(config, AdmConfig):
        from fastdiff.models.adm import AdmUNet

        return AdmUNet(config, recompute=recompute, attention=attention, dropout_seed=seed & (2**64 - 1))
    from fastdiff.models.unet import UNet

    return UNet(config, recompute=recompute, attention=attention)
