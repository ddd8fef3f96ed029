"""Initial weights of a DiT, as published."""

from typing import cast

import torch
from torch import nn

from fastdiff.models.dit.modulation import AdaLNModulation, SharedModulation, TableModulation
from fastdiff.models.embeddings import LabelEmbedder, PatchConv2d, TimestepEmbedder

_STD = 0.02


def initialise(model: nn.Module, last: nn.Linear) -> None:
    """Draw Xavier-uniform layers and normal embeddings, with zeros in the modulations and in ``last``, the output.

    Tables of adaLN-single are normal with the variance 1 / D, and their shared layer is normal (PixArt), so that gates
    are not zero there. Norms and shares of values have their initial constants already.
    """
    modules = list(model.modules())
    for kind in (nn.Linear, PatchConv2d):
        for module in modules:
            if isinstance(module, kind):
                _xavier(module)
    for module in modules:
        if isinstance(module, LabelEmbedder):
            nn.init.normal_(module.embedding_table.weight, std=_STD)
    for module in modules:
        if isinstance(module, TimestepEmbedder):
            for layer in module.mlp:
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=_STD)
    for module in modules:
        if isinstance(module, SharedModulation):
            nn.init.normal_(cast(nn.Linear, module[1]).weight, std=_STD)
        elif isinstance(module, AdaLNModulation):
            _zero(cast(nn.Linear, module[1]))
        elif isinstance(module, TableModulation):
            table = module.scale_shift_table
            nn.init.normal_(table, std=table.shape[1] ** -0.5)
    _zero(last)


def learned_positions(count: int, hidden: int) -> nn.Parameter:
    """Return drawn positions of ``count`` further tokens, ``[1, count, hidden]``."""
    return nn.Parameter(nn.init.normal_(torch.empty(1, count, hidden), std=_STD))


def _xavier(layer: nn.Linear | nn.Conv2d) -> None:
    nn.init.xavier_uniform_(layer.weight.data.flatten(1))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _zero(layer: nn.Linear) -> None:
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
