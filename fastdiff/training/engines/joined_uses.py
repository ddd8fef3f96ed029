"""Gradients of what a module reads, added up over its uses in the module before those of other readers.

Autograd adds up the gradients of a tensor in the order in which its readers end. ZeRO-3 puts a node between every
module and each of its inputs, down to the blocks, and that node has one gradient for all uses in the module. So does
the graph of a compiled block.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def join_uses(model: nn.Module, blocks: tuple[type[nn.Module], ...]) -> None:
    """Let every module, down to those of the classes ``blocks``, read its inputs through nodes, as under ZeRO-3."""
    for module in _down_to(model, blocks):
        module.register_forward_pre_hook(_through_nodes)


def _down_to(module: nn.Module, blocks: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    yield module
    if not isinstance(module, blocks):
        for child in module.children():
            yield from _down_to(child, blocks)


def _through_nodes(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return tree_map_only(torch.Tensor, torch.ops.aten.alias, inputs)  # keeps strides, unlike a view
