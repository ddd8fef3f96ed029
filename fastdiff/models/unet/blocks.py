"""Layers of the UNet of Stable Diffusion, named as in diffusers.

Feature maps are channels_last: ``[B, C, H, W]`` in the memory order ``[B, H, W, C]``, so the tokens ``[B, H * W, C]``
of a map are a view of it. A map whose sum the next norm can compute is passed as its ``Terms`` instead.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.config.networks.pretrained import CAPTION_TOKENS
from fastdiff.models.blockwise import is_compiled, run_block
from fastdiff.models.linear import summed_later
from fastdiff_kernels import attention as attention_op
from fastdiff_kernels import dispatch
from fastdiff_kernels.geglu import geglu
from fastdiff_kernels.group_norm import group_norm
from fastdiff_kernels.names import AttentionBackend

_TRANSFORMER_NORM_EPS = 1e-6
_MLP_RATIO = 4

Terms: TypeAlias = "tuple[Tensor, Tensor | None, Tensor | None]"
"""Terms of a map ``[B, C, H, W]``: branch and base of its shape, and a shift ``[B, C]`` of all positions; None is 0."""


def in_order(x: Tensor) -> Tensor:
    """Return ``x [B, C, H, W]`` with the channels_last stride also on its first axis.

    ZeRO-3's hooks pass every tensor through ``view_as``, which changes the stride of the batch axis of a single sample;
    torch then treats the map as contiguous.
    """
    return x if x.shape[0] != 1 else x.permute(0, 2, 3, 1).reshape(1, *x.shape[2:], -1).permute(0, 3, 1, 2)


class _Joined(torch.autograd.Function):
    """Concatenation of two maps along the channels, whose first gradient is channels_last again.

    The gradient of ``torch.cat`` is a slice. The first map is a sum of two outputs; a kernel or a compiled block, which
    needs dense memory, would copy the slice for each. Autograd adds the slice of the second map to other gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, skip: Tensor) -> Tensor:
        ctx.channels = x.shape[1]
        return torch.cat([x, skip], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        first, second = gradient.tensor_split([ctx.channels], dim=1)
        return first.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), second


def summed(branch: Tensor, base: Tensor | None, shift: Tensor | None) -> Tensor:
    """Return the map of the terms."""
    x = branch if base is None else branch + base
    return in_order(x if shift is None else x + shift.to(x.dtype)[:, :, None, None])


def joined(terms: Terms, skip: Tensor) -> Tensor:
    """Terms of ``[B, C1, H, W]`` and ``skip [B, C2, H, W] -> [B, C1 + C2, H, W]``."""
    return cast(Tensor, _Joined.apply(summed(*terms), in_order(skip)))  # type: ignore[no-untyped-call]


def doubled(x: Tensor) -> Tensor:
    """Upsample by nearest neighbour, ``[B, C, H, W] -> [B, C, 2H, 2W]``, channels_last.

    ``F.interpolate`` does not serve: its backward pass on CUDA makes contiguous copies, and a map of one pixel, which
    has both memory orders, comes out contiguous.
    """
    batch, channels, height, width = x.shape
    repeated = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(-1, -1, 2, -1, 2, -1)  # -> [B, H, 2, W, 2, C]
    return repeated.contiguous().view(batch, 2 * height, 2 * width, channels).permute(0, 3, 1, 2)


def block_choice(block: nn.Module, op: str, example: Tensor) -> dispatch.Choice:
    """Return ``dispatch.choice`` within a block; a compiled block also compiles the reference."""
    chosen = dispatch.choice(op, example)
    if not is_compiled(block) or chosen.forward == "triton":
        return chosen
    by = "compile (Inductor)"
    return replace(chosen, forward=by, backward=by, why=f"{chosen.why}; in a compiled block")


class Conv2d(nn.Conv2d):
    """Convolution of channels_last maps."""

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W] -> [B, C_out, H_out, W_out]``."""
        return super().forward(in_order(x))


def without_bias(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``layer(x)`` without its bias, and the bias as a shift ``[B, C_out]``, fp32; None: it is added already.

    cuDNN adds a bias in a pass of its own, and torch sums its gradient in another. The kernels of a norm add a shift to
    what they read, and sum its gradient where they write that of the map. Elsewhere, and for layers with adapters, the
    layer does all. The parameters of a layer are read outside of its forward: under ZeRO-3 only blocks may do so. The
    shift is a copy, because it leaves the block, and fp32, because its gradient is a sum.
    """
    if type(layer) is not Conv2d or layer.bias is None or dispatch.choose("group_norm", x) != "triton":
        return layer(x), None
    out = F.conv2d(in_order(x), layer.weight, None, layer.stride, layer.padding)
    return out, layer.bias.float().repeat(x.shape[0], 1)


def added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the sum of two shifts."""
    return first + second if first is not None and second is not None else second if first is None else first


class GroupNorm(nn.Module):
    """Group normalisation of channels_last maps, optionally followed by SiLU; see ``fastdiff_kernels.group_norm``."""

    def __init__(self, groups: int, channels: int, *, eps: float = 1e-5, silu: bool = True) -> None:
        super().__init__()
        self.groups, self.eps, self.silu = groups, eps, silu
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(
        self, x: Tensor, *, shift: Tensor | None = None, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Normalise ``x + shift + residual``; return the result and ``x``, or with a residual their sum."""
        x, residual = in_order(x), None if residual is None else in_order(residual)
        out = group_norm(
            x, self.groups, self.weight, self.bias, eps=self.eps, silu=self.silu, shift=shift, residual=residual
        )
        return out if isinstance(out, tuple) else (out, x)


class ResBlock(nn.Module):
    """Residual block: two convolutions, with the time between them, and a shortcut."""

    def __init__(self, channels: int, out_channels: int, time_dim: int, groups: int) -> None:
        super().__init__()
        self.norm1 = GroupNorm(groups, channels)
        self.conv1 = Conv2d(channels, out_channels, kernel_size=3, padding=1)
        self.time_emb_proj = nn.Linear(time_dim, out_channels)
        self.norm2 = GroupNorm(groups, out_channels)
        self.conv2 = Conv2d(out_channels, out_channels, kernel_size=3, padding=1)
        changes = channels != out_channels
        self.conv_shortcut = Conv2d(channels, out_channels, kernel_size=1) if changes else None

    def forward(self, branch: Tensor, base: Tensor | None, shift: Tensor | None, time: Tensor) -> Terms:
        """Return the terms of the output ``[B, C_out, H, W]`` for those of ``x [B, C, H, W]``.

        For C_out = C the base is ``x``. ``time [B, D]`` is the embedding, after its SiLU.
        """
        out, x = self.norm1(branch, shift=shift, residual=base)
        out, bias = without_bias(self.conv1, out)
        out, _ = self.norm2(out, shift=added(self.time_emb_proj(time), bias))
        branch, shift = without_bias(self.conv2, out)
        if self.conv_shortcut is None:
            return branch, x, shift
        base, bias = without_bias(self.conv_shortcut, x)
        return branch, base, added(shift, bias)

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its norms, which are alike; see ``fastdiff_kernels.dispatch.Explains``."""
        yield block_choice(self, "group_norm", example)


class Transformer(nn.Module):
    """Transformer blocks over the positions of a map, with a shortcut."""

    def __init__(
        self, channels: int, heads: int, layers: int, length: int, *, context_dim: int, groups: int, linear: bool,
        attention: AttentionBackend, recompute: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.linear, self.recompute = linear, recompute
        self.norm = GroupNorm(groups, channels, eps=_TRANSFORMER_NORM_EPS, silu=False)
        self.proj_in = _projection(channels, linear)
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(channels, heads, length, context_dim, attention) for _ in range(layers)
        )
        self.proj_out = _projection(channels, linear)

    def forward(self, branch: Tensor, base: Tensor | None, shift: Tensor | None, context: Tensor) -> Terms:
        """Return the terms of the output for those of the input, both ``[B, C, H, W]``; the base is the input."""
        out, x = self.norm(branch, shift=shift, residual=base)
        size = x.shape[2:]
        tokens = self.proj_in(_tokens(out)) if self.linear else _tokens(self.proj_in(out))  # [B, C, H, W] -> [B, T, C]
        for block in self.transformer_blocks:
            tokens = run_block(block, tokens, context, recompute=self.recompute)
        branch = _map(self.proj_out(tokens), size) if self.linear else self.proj_out(_map(tokens, size))
        return branch, x, None

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its norm; see ``fastdiff_kernels.dispatch.Explains``."""
        yield dispatch.choice("group_norm", example)


def _projection(channels: int, linear: bool) -> nn.Module:
    return nn.Linear(channels, channels) if linear else Conv2d(channels, channels, kernel_size=1)


def _tokens(x: Tensor) -> Tensor:
    """``[B, C, H, W] -> [B, H * W, C]``, a view."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def _map(tokens: Tensor, size: torch.Size) -> Tensor:
    """``[B, H * W, C] -> [B, C, H, W]``, a view."""
    return tokens.view(tokens.shape[0], *size, -1).permute(0, 3, 1, 2)


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention to the text and a gated feed-forward layer, each with a shortcut."""

    def __init__(self, width: int, heads: int, length: int, context_dim: int, attention: AttentionBackend) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = Attention(width, width, heads, (length, length), attention)
        self.norm2 = nn.LayerNorm(width)
        self.attn2 = Attention(width, context_dim, heads, (length, CAPTION_TOKENS), attention)
        self.norm3 = nn.LayerNorm(width)
        self.ff = FeedForward(width)

    def forward(self, tokens: Tensor, context: Tensor) -> Tensor:
        """``tokens [B, T, C], context [B, L, D] -> [B, T, C]``."""
        normed = self.norm1(tokens)
        tokens = tokens + self.attn1(normed, normed)
        tokens = tokens + self.attn2(self.norm2(tokens), context)
        return cast(Tensor, tokens + self.ff(self.norm3(tokens)))


class Attention(nn.Module):
    """Multi-head attention of tokens to a context; query, key and value projections have no bias."""

    def __init__(
        self, width: int, context_dim: int, heads: int, lengths: tuple[int, int], backend: AttentionBackend
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.lengths, self.backend = heads, width // heads, lengths, backend
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context_dim, width, bias=False)
        self.to_v = nn.Linear(context_dim, width, bias=False)
        # diffusers' second entry is a dropout without weights.
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, tokens: Tensor, context: Tensor) -> Tensor:
        """``tokens [B, T, C], context [B, L, D] -> [B, T, C]``."""
        query, key, value = (
            projected.view(*projected.shape[:2], self.heads, self.head_dim).transpose(1, 2)  # [B, T, C] -> [B, H, T, D]
            for projected in (self.to_q(tokens), self.to_k(context), self.to_v(context))
        )
        mixed = attention_op.attention(query, key, value, backend=self.backend)
        return cast(Tensor, self.to_out[0](mixed.transpose(1, 2).flatten(2)))  # [B, H, T, D] -> [B, T, C]

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choice of its attention; see ``fastdiff_kernels.dispatch.Explains``."""
        yield attention_op.choice(self.head_dim, *self.lengths, example, self.backend)


class FeedForward(nn.Module):
    """Feed-forward layer: GEGLU (Shazeer 2020, arXiv:2002.05202, eq. 6) and a linear layer back to the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = _MLP_RATIO * width
        self.net = nn.ModuleList([GEGLU(width, inner), nn.Identity(), nn.Linear(inner, width)])

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T, C] -> [B, T, C]``."""
        return cast(Tensor, self.net[2](self.net[0](tokens)))


class GEGLU(nn.Module):
    """Gated linear layer: GELU of the second half multiplies the first half."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * inner)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T, C] -> [B, T, inner]``."""
        return geglu(*summed_later(self.proj, tokens, "group_norm"))


class Downsample(nn.Module):
    """Downsampling by a strided convolution: half the height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W] -> [B, C, H / 2, W / 2]``."""
        return cast(Tensor, self.conv(x))


class Upsample(nn.Module):
    """Nearest-neighbour upsampling and a convolution: twice the height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W] -> [B, C, 2H, 2W]``."""
        return cast(Tensor, self.conv(doubled(x)))


class TimestepEmbedding(nn.Module):
    """Two-layer SiLU MLP of features: ``[B, F] -> [B, D]``."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(features, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, F] -> [B, D]``, both in the dtype of the weights."""
        return cast(Tensor, self.linear_2(F.silu(self.linear_1(features))))
