"""Linear layers whose bias another op adds, or whose bias's gradient another op sums."""

from typing import Literal, cast

import torch
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


class OutputLayer(nn.Linear):
    """A linear layer whose weight, not its bias, is divided by a ratio of widths in the product (muP's readout)."""

    def __init__(self, inputs: int, outputs: int, width_ratio: float) -> None:
        super().__init__(inputs, outputs)
        self.width_ratio = width_ratio

    def forward(self, x: Tensor) -> Tensor:
        """``[..., C] -> [..., outputs]``."""
        rows = torch.addmm(self.bias, x.flatten(0, -2), self.weight.t(), alpha=1.0 / self.width_ratio)
        return rows.view(*x.shape[:-1], -1)


def output_layer(inputs: int, outputs: int, width_ratio: float) -> nn.Linear:
    """Return the last layer of a network: torch's own where the ratio is 1."""
    return nn.Linear(inputs, outputs) if width_ratio == 1.0 else OutputLayer(inputs, outputs, width_ratio)


def _is_plain(layer: nn.Module, x: Tensor, op: str) -> bool:
    """Whether the layer is no more than torch's with a bias, and the kernels run."""
    if type(layer) is not nn.Linear or layer.bias is None:
        return False
    return dispatch.choose(op, x) == "triton"
