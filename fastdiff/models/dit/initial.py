"""Initial weights of a DiT: as published, or those of muP."""

from typing import cast

import torch
from torch import nn

from fastdiff.models.dit.final_layer import FinalLayer
from fastdiff.models.dit.modulation import AdaLNModulation, SharedModulation, TableModulation
from fastdiff.models.embeddings import LabelEmbedder, TimestepEmbedder
from fastdiff.models.initial import STD, draw_by_fan_in, draw_layers, draw_table, zero


def initialise(model: nn.Module, last: FinalLayer) -> None:
    """Draw Xavier-uniform layers and normal embeddings, with zeros in the modulations and in the output.

    Tables of adaLN-single are normal with the variance 1 / D, and their shared layer is normal (PixArt), so that gates
    are not zero there. The layer that predicts the class token of a teacher is zero only where ``starts_at_zero`` says
    so. Norms and shares of values have their initial constants already.
    """
    modules = list(model.modules())
    draw_layers(model)
    for module in modules:
        if isinstance(module, LabelEmbedder):
            nn.init.normal_(module.embedding_table.weight, std=STD)
    for module in modules:
        if isinstance(module, TimestepEmbedder):
            for layer in module.mlp:
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=STD)
    for module in modules:
        if isinstance(module, SharedModulation):
            nn.init.normal_(cast(nn.Linear, module[1]).weight, std=STD)
        elif isinstance(module, AdaLNModulation):
            zero(cast(nn.Linear, module[1]))
        elif isinstance(module, TableModulation):
            draw_table(module.scale_shift_table)
    zero(last.linear)
    if last.linear_cls is not None and last.starts_at_zero:
        zero(last.linear_cls)


def initialise_for_transfer(model: nn.Module, last: FinalLayer) -> None:
    """Draw weights by which learning rates carry over between widths (muP; Zheng et al. 2025, arXiv:2505.15270).

    Layers are normal with the variance 1 / inputs, those of the modulations among them: with zeros there the best rate
    moves with the width. Classes are normal with the variance 1. The tables of adaLN-single are as wide as the network
    and get the same variance at every width. Both output layers are zero. Norms, shares of values and positions of the
    class tokens keep their initial constants.
    """
    draw_by_fan_in(model)
    for module in model.modules():
        if isinstance(module, LabelEmbedder):
            nn.init.normal_(module.embedding_table.weight)
        elif isinstance(module, TableModulation):
            nn.init.normal_(module.scale_shift_table, std=STD)
    for layer in (last.linear, last.linear_cls):
        if layer is not None:
            zero(layer)


def learned_positions(count: int, hidden: int) -> nn.Parameter:
    """Return drawn positions of ``count`` further tokens, ``[1, count, hidden]``."""
    return nn.Parameter(nn.init.normal_(torch.empty(1, count, hidden), std=STD))


def mask_token(hidden: int) -> nn.Parameter:
    """Return the token that stands for others, ``[1, 1, hidden]``: zero (SR-DiT)."""
    return nn.Parameter(nn.init.zeros_(torch.empty(1, 1, hidden)))
