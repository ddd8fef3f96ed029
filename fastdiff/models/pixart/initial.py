"""Initial weights of a PixArt: as published, where diffusers' class draws others, or those of muP."""

from collections.abc import Iterable
from typing import cast

from torch import nn

from fastdiff.models.initial import STD, draw_by_fan_in, draw_layers, draw_table, zero
from fastdiff.models.pixart.block import CrossAttention, PixArtBlock, SelfAttention
from fastdiff.models.pixart.embeddings import AdaLayerNormSingle, CaptionProjection


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
    draw_layers(model)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            _packed([module.to_q, module.to_k, module.to_v])
        elif isinstance(module, CrossAttention):
            _packed([module.to_k, module.to_v])
            zero(cast(nn.Linear, module.to_out[0]))
        elif isinstance(module, AdaLayerNormSingle | CaptionProjection):
            for layer in module.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=STD)
        elif isinstance(module, PixArtBlock):
            draw_table(module.scale_shift_table)
    draw_table(table)
    zero(last)


def initialise_for_transfer(model: nn.Module, last: nn.Linear, table: nn.Parameter) -> None:
    """Draw weights by which learning rates carry over between widths (muP; Zheng et al. 2025, arXiv:2505.15270).

    Layers are normal with the variance 1 / inputs. All tables are as wide as the network and get the same variance at
    every width. The output of each cross-attention and ``last`` are zero, as published. Arguments as in
    ``initialise``.
    """
    draw_by_fan_in(model)
    for module in model.modules():
        if isinstance(module, CrossAttention):
            zero(cast(nn.Linear, module.to_out[0]))
        elif isinstance(module, PixArtBlock):
            nn.init.normal_(module.scale_shift_table, std=STD)
    nn.init.normal_(table, std=STD)
    zero(last)


def _packed(layers: Iterable[nn.Linear]) -> None:
    """Draw layers as the rows of one Xavier-uniform matrix."""
    layers = list(layers)
    bound = (6 / (layers[0].in_features + sum(layer.out_features for layer in layers))) ** 0.5
    for layer in layers:
        nn.init.uniform_(layer.weight, -bound, bound)
