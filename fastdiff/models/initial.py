"""Draws of initial weights that transformers share, from torch's global generator."""

from torch import Tensor, nn

from fastdiff.models.embeddings import PatchConv2d

STD = 0.02
"""Standard deviation of embeddings and of layers that are drawn like them."""


def draw_layers(model: nn.Module) -> None:
    """Draw all linear layers, then all embeddings of patches, Xavier-uniform with zero biases."""
    modules = list(model.modules())
    for kind in (nn.Linear, PatchConv2d):
        for module in modules:
            if isinstance(module, kind):
                nn.init.xavier_uniform_(module.weight.data.flatten(1))
                _zero_bias(module)


def draw_by_fan_in(model: nn.Module) -> None:
    """Draw all linear layers, then all embeddings of patches, normal with the variance 1 / inputs and zero biases.

    So muP draws them: the size of an output does not depend on the width of either side (Yang et al. 2022,
    arXiv:2203.03466, table 3).
    """
    modules = list(model.modules())
    for kind in (nn.Linear, PatchConv2d):
        for module in modules:
            if isinstance(module, kind):
                nn.init.normal_(module.weight, std=module.weight.shape[1:].numel() ** -0.5)
                _zero_bias(module)


def draw_table(table: Tensor) -> None:
    """Draw a table of adaLN-single, ``[parts, D]``, with the variance 1 / D (Chen et al. 2023, arXiv:2310.00426)."""
    nn.init.normal_(table, std=table.shape[1] ** -0.5)


def zero(layer: nn.Linear) -> None:
    """Set a layer to zero."""
    nn.init.zeros_(layer.weight)
    _zero_bias(layer)


def _zero_bias(layer: nn.Linear | PatchConv2d) -> None:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
