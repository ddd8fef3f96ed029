"""Linear layers whose bias a later op adds, or whose bias gradient a later op sums.

torch sums the gradient of a bias in a pass over the gradient of the layer's output. The op that writes or reads that
gradient anyway can sum it. This holds for the kernels; elsewhere, and for layers with adapters or quantised weights,
the layer does all. The weight and the bias of a layer are read outside of its forward: under ZeRO-3, which gathers them
for a whole block, only blocks may do so.
"""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff_kernels import dispatch


def summed_later(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``layer(x)`` and the bias whose gradient an op of ``bias_gradient`` has to sum; None: the layer does."""
    if not _is_plain(layer, x) or not layer.bias.requires_grad:
        return layer(x), None
    plain = cast(nn.Linear, layer)
    return F.linear(x, plain.weight, plain.bias.detach()), plain.bias


def without_bias(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``layer(x)`` without its bias, and the bias; None: it is added already."""
    if not _is_plain(layer, x):
        return layer(x), None
    plain = cast(nn.Linear, layer)
    return F.linear(x, plain.weight), plain.bias


def _is_plain(layer: nn.Module, x: Tensor) -> bool:
    """Whether the layer is no more than torch's with a bias, and the kernels run."""
    if type(layer) is not nn.Linear or layer.bias is None:
        return False
    return dispatch.choose("adaln", x) == "triton"
