"""Initial weights of a PixArt, as published; diffusers' class draws others."""

from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn

from fastdiff.models.embeddings import PatchConv2d
from fastdiff.models.pixart.block import CrossAttention, PixArtBlock, SelfAttention
from fastdiff.models.pixart.embeddings import AdaLayerNormSingle, CaptionProjection

_STD = 0.02


def initialise(model: nn.Module, last: nn.Linear, table: nn.Parameter) -> None:
    """Draw all weights.

    Xavier-uniform layers, queries, keys and values as parts of the packed layers that the published network has;
    normal ones for time, size and caption; tables normal with the variance 1 / D, so that gates are not zero. The
    output of each cross-attention and ``last`` are zero: a fresh network outputs exactly 0.

    Args:
        model: the network.
        last: its output layer.
        table: of the shift and scale before it, ``[2, D]``.
    """
    modules = list(model.modules())
    for kind in (nn.Linear, PatchConv2d):
        for module in modules:
            if isinstance(module, kind):
                _xavier(module)
    for module in modules:
        if isinstance(module, SelfAttention):
            _packed([module.to_q, module.to_k, module.to_v])
        elif isinstance(module, CrossAttention):
            _packed([module.to_k, module.to_v])
            _zero(cast(nn.Linear, module.to_out[0]))
        elif isinstance(module, AdaLayerNormSingle | CaptionProjection):
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=_STD)
        elif isinstance(module, PixArtBlock):
            _table(module.scale_shift_table)
    _table(table)
    _zero(last)


def _xavier(layer: nn.Linear | nn.Conv2d) -> None:
    nn.init.xavier_uniform_(layer.weight.data.flatten(1))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _packed(layers: Iterable[nn.Linear]) -> None:
    """Draw layers as the rows of one Xavier-uniform matrix."""
    layers = list(layers)
    bound = (6 / (layers[0].in_features + sum(layer.out_features for layer in layers))) ** 0.5
    for layer in layers:
        nn.init.uniform_(layer.weight, -bound, bound)


def _table(table: Tensor) -> None:
    nn.init.normal_(table, std=table.shape[1] ** -0.5)


def _zero(layer: nn.Linear) -> None:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
