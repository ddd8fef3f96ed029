"""Networks made of blocks: the units of compilation, of recomputation and of ZeRO-3's gathering."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
import torch._dynamo.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastdiff.config.networks.registry import ModelConfig

_RECOMPILES = 1024
"""Shapes of one class of blocks that are compiled; a UNet has dozens, torch gives up after 8."""


class BlockwiseModel(nn.Module):
    """Base of the networks."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = ()
    """Classes of the blocks. No block lies in another one, and none draws random numbers from a generator."""
    config: ModelConfig
    inputs: ClassVar[tuple[str, ...]] = ()
    """What the network can be conditioned on besides the time: names of arguments of its forward."""
    low_res_size: int = 0
    """Height and width of the small images that the network enlarges; 0: it is given none."""

    def compile_blocks(self, **options: Any) -> Self:
        """Compile the forward of every block in place and return the network.

        The inner forward and not the module is compiled, so that ZeRO-3's gathering hooks stay outside the graph.
        Blocks of equal shapes share one graph, so what else they differ in, such as the stream of a dropout, must reach
        them as a tensor: of a number, each value has its own graph. ``options`` go to ``torch.compile``; ``fullgraph``
        is True unless given.
        """
        options.setdefault("fullgraph", True)
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _RECOMPILES)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _RECOMPILES)
        for module in self.modules():
            if isinstance(module, self.block_classes):
                module.forward = torch.compile(module.forward, **options)
        return self


def is_compiled(block: nn.Module) -> bool:
    """Whether ``compile_blocks`` was there."""
    return "forward" in block.__dict__


def run_block(block: nn.Module, *inputs: Tensor | None, recompute: bool) -> Any:
    """Call ``block``; with ``recompute`` it keeps its inputs alone and runs again in the backward pass."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
    return block(*inputs)
