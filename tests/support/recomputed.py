"""Blocks of a network that a step runs once or twice."""

from collections import Counter

from torch import nn

from fastdiff.models.blockwise import BlockwiseModel


def calls_of(model: BlockwiseModel) -> Counter[nn.Module]:
    """Count the forward passes of the modules of the block classes from now on, in the order of their first one."""
    calls: Counter[nn.Module] = Counter()
    for module in model.modules():
        if isinstance(module, model.block_classes):
            module.register_forward_pre_hook(lambda module, _: calls.update([module]))
    return calls


def check_calls(model: BlockwiseModel, calls: Counter[nn.Module], stored: int) -> None:
    """Check that a step ran all blocks, in their order, and again those before the last ``stored`` ones."""
    blocks = model.blocks_in_order()
    assert list(calls) == blocks
    assert list(calls.values()) == [2] * (len(blocks) - stored) + [1] * stored
