"""Construction of the networks, with initial weights from a configuration and a seed, or with given weights."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.deferred import Deferred
from fastdiff.models.family import family_of
from fastdiff.rng import seed_initial_values
from fastdiff_kernels.names import AttentionBackend

__all__ = ["Model", "build_deferred", "build_model", "load_model"]

Model: TypeAlias = BlockwiseModel


def build_model(
    config: ModelConfig, *, recompute: bool = False, attention: AttentionBackend = "auto", seed: int = 0
) -> Model:
    """Build a network whose initial weights are a pure function of ``config`` and ``seed``.

    The global random state of torch is restored, so the order of construction does not matter. The weights are fp32 on
    the CPU; under ``torch.device("meta")`` they have no data.

    Args:
        config: Shape of the network.
        recompute: Recompute each block in the backward pass instead of storing its activations.
        attention: Implementation of attention, see ``fastdiff_kernels.attention``.
        seed: Any integer; its low 64 bits count.

    Raises:
        ValueError: The default device is another one, whose generator would draw other weights.
    """
    device = torch.get_default_device()
    if device.type not in ("cpu", "meta"):
        raise ValueError(f"build_model under the default device {device}: build on the CPU and move the model")
    with torch.random.fork_rng(devices=[]):
        seed_initial_values(seed)
        return _new(config, recompute, attention, seed)


def build_deferred(
    config: ModelConfig, *, recompute: bool = False, attention: AttentionBackend = "auto", seed: int = 0
) -> Deferred[Model]:
    """Build the network of ``build_model`` on the device ``meta``, with its initial weights one after another."""
    seed &= 2**64 - 1
    return Deferred(lambda: _new(config, recompute, attention, seed), seed)


def load_model(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    recompute: bool = False,
    attention: AttentionBackend = "auto",
    seed: int = 0,
) -> Model:
    """Build a network with given parameters, on their device, without initialising it.

    Args:
        config: Shape of the network.
        weights: Every trained parameter by name. Buffers and unused parameters (``ModelFamily``) may be missing: they
            are then those of a new network.
        recompute: As in ``build_model``.
        attention: As in ``build_model``.
        seed: Key of the dropout.

    Raises:
        RuntimeError: A parameter is missing, unknown or of another shape.
    """
    with torch.device("meta"):
        model = _new(config, recompute, attention, seed)
    family, device = family_of(config), next(iter(weights.values())).device
    kept = {**family.buffers(config), **family.unused(config)}
    missing = {name: value.to(device) for name, value in kept.items() if name not in weights}
    model.load_state_dict({**missing, **weights}, assign=True)
    return model


def _new(config: ModelConfig, recompute: bool, attention: AttentionBackend, seed: int) -> Model:
    return family_of(config).build(config, recompute=recompute, attention=attention, seed=seed & (2**64 - 1))
