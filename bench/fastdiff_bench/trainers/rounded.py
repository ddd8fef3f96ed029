"""Linear layers whose operands are rounded to e4m3 as asked: where FP8 errs, and whether finer scales help.

The products themselves are exact. The scales are powers of two from the values themselves, with the margin of a run.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastdiff.models.delayed_scales import MARGIN
from fastdiff.models.dit.block import DiTBlock
from fastdiff.models.dit.fp8 import Fp8DiTBlock
from fastdiff_kernels.fp8.values import E4M3, LARGEST

_LEAST = 2.0**-100
"""Of a largest value, so that its scale is not 0."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Which products of a layer have rounded operands."""

    output: bool = True
    input_gradient: bool = True
    weight_gradient: bool = True
    features: float = math.inf
    """Neighbours in a row, along the axis that is summed, that share a scale; 0: a row; infinite: the matrix."""


ROUNDINGS = {
    "rounded": Rounding(),
    "rounded, a scale per row": Rounding(features=0),
    "rounded, a scale per 64 of a row": Rounding(features=64),
    "rounded, outputs only": Rounding(input_gradient=False, weight_gradient=False),
    "rounded, input gradients only": Rounding(output=False, weight_gradient=False),
    "rounded, weight gradients only": Rounding(output=False, input_gradient=False),
}
"""By name."""


def convert(model: nn.Module, rounding: Rounding) -> None:
    """Let the layers that FP8 concerns round their operands, in all blocks, in place."""
    for block in [module for module in model.modules() if isinstance(module, DiTBlock)]:
        for layer in [layer for group in Fp8DiTBlock.layers(block) for layer in group]:
            layer.__class__ = _RoundedLinear
            assert isinstance(layer, _RoundedLinear)
            layer.rounding = rounding


def rounded(matrix: Tensor, features: float) -> Tensor:
    """Round ``[N, K]`` to e4m3 numbers times their scales; returns fp32. See ``Rounding`` for ``features``."""
    values = matrix.float()
    parts = values.reshape(1, -1) if math.isinf(features) else values.reshape(-1, int(features) or values.shape[1])
    largest = parts.abs().amax(1, keepdim=True).clamp_min(_LEAST)
    scale = torch.exp2(torch.ceil(torch.log2(largest * (MARGIN / LARGEST))))
    return ((parts / scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * scale).view(values.shape)


def _product(a: Tensor, b: Tensor, features: float, *, rounds: bool) -> Tensor:
    """``a [N, K], b [M, K] -> [N, M]``, fp32."""
    if rounds:
        return rounded(a, features) @ rounded(b, features).t()
    return a.float() @ b.float().t()


class _RoundedLinear(nn.Linear):
    rounding: Rounding

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = _Rounded.apply(inputs, self.weight, self.bias, self.rounding)  # type: ignore[no-untyped-call]
        return out


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, how: Rounding) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.how = how
        out = _product(inputs.flatten(0, -2), weight, how.features, rounds=how.output) + bias.float()
        return out.to(inputs.dtype).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        inputs, weight = ctx.saved_tensors
        how, gradient, rows = ctx.how, gradients[0].flatten(0, -2), inputs.flatten(0, -2)
        of_inputs = _product(gradient, weight.t(), how.features, rounds=how.input_gradient)
        of_weight = _product(gradient.t(), rows.t(), how.features, rounds=how.weight_gradient)
        of_bias = gradient.float().sum(0)
        return of_inputs.to(inputs.dtype).view_as(inputs), of_weight.to(weight.dtype), of_bias.to(weight.dtype), None
