"""Linear layers with frozen weights in 8 or 4 bits, and a gradient only for their inputs.

4 bits are NF4 with one fp32 scale per 64 weights (Dettmers et al. 2023, arXiv:2305.14314, section 3; without double
quantisation). 8 bits are integers with one fp32 scale per row, the weight format of LLM.int8 (Dettmers et al. 2022,
arXiv:2208.07339, section 2). bitsandbytes quantises both. Activations are not quantised.
"""

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Bits = Literal[8, 4]

_NF4_BLOCK = 64


class QuantizedLinear(nn.Module):
    """``x @ weight.T + bias`` with a quantised weight.

    The weight is dequantised to the dtype of ``x`` for the forward pass, and again for the backward pass. It is stored
    in ``numel * bits / 8`` bytes and the scales: relative to bf16, 0.281 for 4 bits and 0.5 + 2 / ``in_features`` for 8
    bits. Weight and scales are byte buffers: DeepSpeed moves buffers to its device, but partitions only parameters and
    casts only floating-point tensors.

    Args:
        linear: fp32 layer on the CPU or a GPU; its bias is used unchanged.
        bits: bits per weight.
    """

    packed: Tensor
    """The weight: ``[ceil(out * in / 2), 1]`` uint8 (4 bits), ``[out, in]`` int8 (8 bits)."""
    scale: Tensor
    """Bytes of the fp32 scales, uint8: one per block of 64 weights (4 bits) or per output (8 bits)."""

    def __init__(self, linear: nn.Linear, bits: Bits) -> None:
        import bitsandbytes  # noqa: F401 - its import takes seconds and registers the operators

        super().__init__()
        self.in_features, self.out_features, self.bits = linear.in_features, linear.out_features, bits
        self.bias = linear.bias
        weight = linear.weight.detach().contiguous()
        if bits == 4:
            packed, scale = torch.ops.bitsandbytes.quantize_4bit(weight, _NF4_BLOCK, "nf4", torch.uint8)
        else:
            packed, scale, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scale", scale.view(torch.uint8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features] -> [..., out_features]`` in the dtype of ``x``, which is the dtype of the bias."""
        inputs = (x, self.bias, self.packed, self.scale, self.out_features)
        return cast(Tensor, _FrozenLinear.apply(*inputs))  # type: ignore[no-untyped-call]

    def dequantized(self) -> Tensor:
        """Return the weight ``[out_features, in_features]``, fp32."""
        return _dequantize(self.packed, self.scale, [self.out_features, self.in_features], torch.float32)

    def extra_repr(self) -> str:
        """Return sizes and bits for ``repr``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


def quantized_weights(model: nn.Module) -> list[int]:
    """Return the weights of each quantised layer of a network, in its order."""
    return [m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantizedLinear)]


class _FrozenLinear(torch.autograd.Function):
    """Linear function that saves the packed weight for the backward pass; autograd would save the dequantised one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: Tensor, scale: Tensor, outputs: int) -> Tensor:
        ctx.save_for_backward(packed, scale)
        ctx.shape = [outputs, x.shape[-1]]
        return F.linear(x, _dequantize(packed, scale, ctx.shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = gradients
        packed, scale = ctx.saved_tensors
        return gradient @ _dequantize(packed, scale, ctx.shape, gradient.dtype), None, None, None, None


def _dequantize(packed: Tensor, scale: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return the weight ``[out, in]`` in ``dtype``."""
    scales = scale.view(torch.float32)
    if packed.dtype == torch.int8:
        return (packed * (scales / 127).unsqueeze(1)).to(dtype)
    weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(packed, scales, _NF4_BLOCK, "nf4", shape, dtype)
    return weight
