"""Base class of the networks; their blocks are the units of compilation, recomputation and ZeRO-3's gathering."""

import inspect
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastdiff.config.networks.registry import ModelConfig
from fastdiff.errors import require
from fastdiff.models.compile_clock import compiled
from fastdiff.models.delayed_scales import Scales

_RECOMPILES = 1024
"""Limit of compiled shapes per block class; a UNet has dozens, torch's default is 8."""
_STORED = "stores_activations"
"""Attribute of the blocks that recomputation leaves out."""


class BlockwiseModel(nn.Module):
    """Base class of the networks."""

    block_classes: tuple[type[nn.Module], ...] = ()
    """Classes of the blocks. Blocks are not nested, and do not draw from a random generator."""
    channels_last: ClassVar[bool] = False
    """Whether its feature maps are channels_last; an engine may lay out its convolution weights so."""
    config: ModelConfig
    scales = Scales()
    """Of its FP8 products."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the conditions that ``forward`` takes besides the time."""
        return tuple(self.config.conditions)

    def blocks_in_order(self) -> list[nn.Module]:
        """Return the blocks in the order in which a pass runs them, by default that of the modules."""
        return [module for module in self.modules() if isinstance(module, self.block_classes)]

    def store_blocks(self, count: int) -> Self:
        """Let the last ``count`` blocks keep their activations where the others are recomputed; return the network.

        The backward pass needs and frees the activations of the last blocks first, before it recomputes any other
        block. So the last block costs no memory, and the others no more than what they keep; as many elsewhere would
        be held beside a block that is recomputed.

        Raises:
            ConfigError: there are fewer blocks.
        """
        blocks = self.blocks_in_order()
        require(
            count <= len(blocks),
            f"--performance.stored_blocks {count}: {type(self).__name__} has {len(blocks)} blocks here; give at most "
            "as many",
        )
        for number, block in enumerate(blocks):
            setattr(block, _STORED, number >= len(blocks) - count)
        return self

    def compile_blocks(self, **options: Any) -> Self:
        """Compile the forward of every block in place and return the network.

        The forward instead of the module is compiled, so that ZeRO-3's gathering hooks stay outside the graph. Blocks
        of equal shapes share one graph; other differences, such as the stream of a dropout, must be passed as tensors,
        because every value of a number has its own graph. ``options`` go to ``torch.compile``; ``fullgraph`` is True
        unless given.
        """
        options.setdefault("fullgraph", True)
        options |= _limits()
        compiled.start()
        for module in self.modules():
            if isinstance(module, self.block_classes):
                module.forward = torch.compile(module.forward, **options)
        return self


def _limits() -> dict[str, Any]:
    """Return the limits of compilation as options of ``torch.compile``, where it has them, or set them for all.

    The settings of Dynamo hold in one thread only, and autograd recomputes blocks in another.
    """
    from torch._dynamo import config  # its import takes seconds

    config.optimize_ddp = False  # it would cut the graphs of blocks at the borders of DDP's buckets
    # That of all functions together, 256 by default, has no option.
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _RECOMPILES)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": _RECOMPILES}
    config.recompile_limit = max(config.recompile_limit, _RECOMPILES)
    return {}


def is_compiled(block: nn.Module) -> bool:
    """Whether ``compile_blocks`` has compiled the block."""
    return "forward" in block.__dict__


def run_block(block: nn.Module, *inputs: Tensor | tuple[Tensor, ...] | None, recompute: bool) -> Any:
    """Call ``block``; with ``recompute`` store only its inputs and run it again in the backward pass.

    Blocks that ``BlockwiseModel.store_blocks`` chose keep their activations nevertheless.
    """
    if recompute and not getattr(block, _STORED, False) and torch.is_grad_enabled():
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
    return block(*inputs)
