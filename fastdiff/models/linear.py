"""Linear layers whose bias another op adds, or whose bias's gradient another op sums."""

from typing import Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff_kernels import dispatch


def summed_later(layer: nn.Module, x: Tensor, op: Literal["adaln", "group_norm"]) -> tuple[Tensor, Tensor | None]:
    """Return ``layer(x)`` and the bias whose gradient an op behind the layer has to sum; None: the layer does.

    It reads weights outside of their layer, so under ZeRO-3, which gathers whole blocks, only blocks may call it.

    Args:
        layer: usually an ``nn.Linear``; one with an adapter, or without a trained bias, runs as it is.
        x: ``[..., C]``.
        op: whose choice of kernels the op behind follows.
    """
    if not _is_plain(layer, x, op) or not layer.bias.requires_grad:
        return layer(x), None
    plain = cast(nn.Linear, layer)
    return F.linear(x, plain.weight, plain.bias.detach()), plain.bias


def without_bias(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``layer(x)`` without its bias, and the bias; None: it is added already."""
    if not _is_plain(layer, x, "adaln"):
        return layer(x), None
    plain = cast(nn.Linear, layer)
    return F.linear(x, plain.weight), plain.bias


def _is_plain(layer: nn.Module, x: Tensor, op: str) -> bool:
    """Whether the layer is no more than torch's with a bias, and the kernels run."""
    if type(layer) is not nn.Linear or layer.bias is None:
        return False
    return dispatch.choose(op, x) == "triton"
