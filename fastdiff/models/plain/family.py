"""Families of plain ``torch.nn.Module`` classes (``config.networks.plain``).

The forward pass of such a network is ``forward(noisy, time, ...)``: ``noisy [B, C, H, W]`` and ``time [B]``, then any
of the conditions of ``fastdiff.batch.Condition`` by name, such as ``label [B]``; it returns ``[B, C, H, W]``. A class
attribute ``block_classes`` may name the classes of its blocks, the units of compilation and of ZeRO-3; ``matrices``
what ``ModelFamily.matrices`` returns, for Muon.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fastdiff.config.networks.plain import arguments_of, modules
from fastdiff.config.networks.registry import ModelConfig
from fastdiff.models.blockwise import BlockwiseModel
from fastdiff.models.cost.dry_network import dry_inputs
from fastdiff.models.family import ModelFamily
from fastdiff_kernels.names import AttentionBackend

_LEADING = 3
"""Arguments of ``forward`` before the conditions: self, noisy, time."""


def __getattr__(name: str) -> ModelFamily[ModelConfig]:
    """Return the family of a plain network; ``ModelConfig.family`` names it as an attribute of this module."""
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _family(name)


@cache
def _family(name: str) -> ModelFamily[ModelConfig]:
    network = modules[name]
    blockwise = _as_blockwise(network)

    def build(config: ModelConfig, /, *, recompute: bool, attention: AttentionBackend, seed: int) -> BlockwiseModel:
        model: BlockwiseModel = blockwise(**arguments_of(config))
        model.config = config
        return model

    @cache
    def multiply_adds(config: ModelConfig) -> float:
        return _multiply_adds(build(config, recompute=False, attention="sdpa", seed=0))

    def buffers(config: ModelConfig) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return dict(build(config, recompute=False, attention="sdpa", seed=0).named_buffers())

    return ModelFamily(
        config=ModelConfig,
        build=build,
        multiply_adds=multiply_adds,
        input_multiply_adds=lambda config: 0.0,
        subject=lambda config: f"A {network.__name__}",
        buffers=buffers,
        matrices=lambda config: getattr(network, "matrices", {}),
    )


def _as_blockwise(network: type[nn.Module]) -> type[Any]:
    """Derive a class of fastdiff's networks, which has the same parameters under the same names."""
    names = tuple(inspect.signature(network.forward).parameters)[_LEADING:]
    own = {"inputs": names, "block_classes": tuple(getattr(network, "block_classes", ()))}
    return type(network.__name__, (network, BlockwiseModel), {**own, "__module__": network.__module__})


@torch.no_grad()
def _multiply_adds(model: BlockwiseModel) -> float:
    """Count the multiply-adds of a pass on one sample by running it."""
    noisy, condition = dry_inputs(model.config, model.inputs, 1)
    with FlopCounterMode(display=False) as counter:
        model.eval()(noisy, torch.zeros(1), **condition)
    return float(counter.get_total_flops()) / 2
