"""Layers of the UNet of IDDPM and ADM, named as in the published checkpoints.

Each layer takes a feature map as its ``Terms``. It returns the terms of its output, and the sum of its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdiff.config.networks.adm import QkvOrder
from fastdiff.models.blockwise import run_block
from fastdiff.models.unet.blocks import (
    Conv2d,
    GroupNorm,
    Terms,
    added,
    block_choice,
    doubled,
    in_order,
    summed,
    without_bias,
)
from fastdiff_kernels import dispatch
from fastdiff_kernels.dropout import dropout
from fastdiff_kernels.group_norm import group_norm
from fastdiff_kernels.names import AttentionBackend
from fastdiff_kernels.packed_attention import packed_attention, packed_choice

Resize = Literal["down", "up"]
Maps: TypeAlias = "tuple[Tensor, Tensor | None, Tensor | None, Tensor]"
"""Terms of the output, and the sum of the input. Flat, because torch's hooks on modules, by which ZeRO-3 reduces the
gradients of a block, see no tensor in a tuple within a tuple."""
_Convolution = TypeVar("_Convolution", bound=nn.Conv1d | nn.Conv2d)


def zeroed(layer: _Convolution) -> _Convolution:
    """Set the weights and the bias of the layer to 0 and return it, so that its path starts at 0."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(cast(Tensor, layer.bias))
    return layer


class ResBlock(nn.Module):
    """Residual block: two convolutions, with time and class between them, and a shortcut.

    Args:
        channels: channels of the input.
        out_channels: channels of the output.
        time_dim: width of the embedding.
        groups: groups of the norms.
        scale_shift: the embedding scales and shifts the second norm (Nichol & Dhariwal 2021, appendix A); otherwise it
            is added before the norm.
        resize: halve (average pooling) or double (nearest neighbour) height and width in both paths; None: neither.
        dropout: dropout before the last convolution.
    """

    def __init__(
        self, channels: int, out_channels: int, time_dim: int, groups: int, *, scale_shift: bool,
        resize: Resize | None, dropout: Dropout,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale_shift, self.resize = scale_shift, resize
        self.in_layers = nn.ModuleList(
            [GroupNorm(groups, channels), nn.Identity(), Conv2d(channels, out_channels, kernel_size=3, padding=1)]
        )
        width = 2 * out_channels if scale_shift else out_channels
        self.emb_layers = nn.ModuleList([nn.Identity(), nn.Linear(time_dim, width)])
        norm = ModulatedGroupNorm(groups, out_channels) if scale_shift else GroupNorm(groups, out_channels)
        last = zeroed(Conv2d(out_channels, out_channels, kernel_size=3, padding=1))
        self.out_layers = nn.ModuleList([norm, nn.Identity(), dropout, last])
        changes = channels != out_channels
        self.skip_connection = Conv2d(channels, out_channels, kernel_size=1) if changes else None

    def forward(
        self, branch: Tensor, base: Tensor | None, shift: Tensor | None, embedding: Tensor,
        position: Tensor | None = None, stream: Tensor | None = None,
    ) -> Maps:  # fmt: skip
        """Map ``[B, C, H, W] -> [B, C_out, H', W']``; see the module.

        Args:
            branch: branch of the map.
            base: base of the map.
            shift: shift of the map.
            embedding: ``[B, D]`` embedding of time and class, after its SiLU.
            position: ``[B]`` int64 positions in the run, the keys of the dropout; None: no dropout.
            stream: ``[]`` int64 stream of the dropout, from ``Dropout.drawn``.
        """
        out, x = self.in_layers[0](branch, shift=shift, residual=base)
        out, bias = without_bias(self.in_layers[2], self._resized(out))
        condition, norm = self.emb_layers[1](embedding), self.out_layers[0]
        out, _ = norm(out, condition, bias) if self.scale_shift else norm(out, shift=added(condition, bias))
        branch, shift = without_bias(self.out_layers[3], self.out_layers[2](out, position, stream))
        shortcut = self._resized(x)
        if self.skip_connection is None:
            return branch, shortcut, shift, x
        shortcut, bias = without_bias(self.skip_connection, shortcut)
        return branch, shortcut, added(shift, bias), x

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choices of its norms (alike) and of its dropout; see ``fastdiff_kernels.dispatch.Explains``."""
        yield block_choice(self, "group_norm", example)
        if self.dropout.p:
            yield block_choice(self, "dropout", example)

    @property
    def dropout(self) -> Dropout:
        """Dropout before the last convolution."""
        return cast(Dropout, self.out_layers[2])

    def _resized(self, x: Tensor) -> Tensor:
        if self.resize is None:
            return x
        return doubled(x) if self.resize == "up" else F.avg_pool2d(in_order(x), 2)


class Dropout(nn.Module):
    """Dropout with a mask that is a function of the position in the run; see ``fastdiff_kernels.dropout``."""

    def __init__(self, p: float, seed: int, stream: int) -> None:
        super().__init__()
        self.p, self.seed, self.stream = p, seed, stream

    def drawn(self, position: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the arguments of ``forward`` for positions ``[B]``: positions and stream, or None without dropout.

        Callers of a compiled block use it: inside the block the stream would be a number, with a graph for each value.
        """
        if position is None or not self.p:
            return None, None
        return position, position.new_full((), self.stream)

    def forward(self, x: Tensor, position: Tensor | None, stream: Tensor | None) -> Tensor:
        """``[B, C, H, W]`` and the result of ``drawn`` ``-> [B, C, H, W]``; no dropout if it is None."""
        if position is None or stream is None:
            return x
        return dropout(x, self.p, seed=self.seed, stream=stream, position=position)


class ModulatedGroupNorm(GroupNorm):
    """``silu(norm(x) * (1 + scale) + shift)``, with a weight and a bias in the norm."""

    def forward(  # type: ignore[override]
        self, x: Tensor, modulation: Tensor, shift: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Normalise ``x + shift``, ``[B, C, H, W]``, with ``modulation [B, 2C]``; return the result and ``x``."""
        x = in_order(x)
        # In at least fp32, as in the kernel: in 16 bits 1 + scale would lose most of a small scale.
        exact = torch.promote_types(torch.float32, x.dtype)
        scale, offset = modulation.to(exact).chunk(2, dim=1)  # [B, 2C] -> 2 x [B, C]
        weight, bias = self.weight.to(exact) * (1 + scale), torch.addcmul(offset, self.bias.to(exact), 1 + scale)
        return cast(Tensor, group_norm(x, self.groups, weight, bias, eps=self.eps, silu=self.silu, shift=shift)), x


class AttentionBlock(nn.Module):
    """Self-attention over the positions of a map, with a shortcut."""

    def __init__(
        self, channels: int, heads: int, length: int, groups: int, backend: AttentionBackend, *, qkv_order: QkvOrder
    ) -> None:
        super().__init__()
        self.qkv_order = qkv_order
        self.heads, self.head_dim, self.length, self.backend = heads, channels // heads, length, backend
        self.norm = GroupNorm(groups, channels, silu=False)
        self.qkv = Pointwise(channels, 3 * channels, kernel_size=1)
        self.proj_out = zeroed(Pointwise(channels, channels, kernel_size=1))

    def forward(self, branch: Tensor, base: Tensor | None, shift: Tensor | None) -> Maps:
        """``[B, C, H, W] -> [B, C, H, W]``; see the module."""
        out, x = self.norm(branch, shift=shift, residual=base)
        batch, channels, height, width = x.shape
        tokens = out.permute(0, 2, 3, 1).flatten(1, 2)  # [B, C, H, W] -> [B, T, C]
        packed = self.qkv(tokens)
        if self.qkv_order == "head_major":
            packed = packed.view(batch, -1, self.heads, 3, self.head_dim).transpose(2, 3)  # -> [B, T, 3, heads, D]
        else:
            packed = packed.view(batch, -1, 3, self.heads, self.head_dim)  # -> [B, T, 3, heads, D]
        # The scale is the product of the paper's d**(-1/4) of queries and keys; the softmax is in fp32.
        projected = self.proj_out(packed_attention(packed, backend=self.backend))
        branch = projected.view(batch, height, width, channels).permute(0, 3, 1, 2)  # [B, T, C] -> [B, C, H, W]
        return branch, x, None, x

    def choices(self, example: Tensor) -> Iterator[dispatch.Choice]:
        """Yield the choices of its norm and its attention; see ``fastdiff_kernels.dispatch.Explains``."""
        yield dispatch.choice("group_norm", example)
        contiguous = self.qkv_order == "qkv_major"
        yield packed_choice(self.head_dim, self.length, example, self.backend, contiguous=contiguous)


class Pointwise(nn.Conv1d):
    """Convolution with kernel size 1 over tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        """``[B, T, C] -> [B, T, C_out]``."""
        return F.linear(tokens, self.weight.squeeze(-1), self.bias)


class Downsample(nn.Module):
    """Downsampling by a strided convolution: half the height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.op = Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)

    def forward(self, branch: Tensor, base: Tensor | None, shift: Tensor | None) -> Maps:
        """``[B, C, H, W] -> [B, C, H / 2, W / 2]``; see the module."""
        x = summed(branch, base, shift)
        return self.op(x), None, None, x


class Upsample(nn.Module):
    """Nearest-neighbour upsampling and a convolution: twice the height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, branch: Tensor, base: Tensor | None, shift: Tensor | None) -> Maps:
        """``[B, C, H, W] -> [B, C, 2H, 2W]``; see the module."""
        x = summed(branch, base, shift)
        return self.conv(doubled(x)), None, None, x


Layer: TypeAlias = ResBlock | AttentionBlock | Downsample | Upsample


class Stage(nn.ModuleList):
    """Layers between two skip connections; with ``recompute`` its blocks run again in the backward pass."""

    def __init__(self, layers: Sequence[Layer], *, recompute: bool) -> None:
        super().__init__(layers)
        self.recompute = recompute

    def forward(self, terms: Terms, embedding: Tensor, position: Tensor | None) -> Maps:
        """Run the layers, with arguments as for a ``ResBlock``; the last result is the input of the first layer."""
        (branch, base, shift), entered = terms, None
        for layer in self:
            condition = (embedding, *layer.dropout.drawn(position)) if isinstance(layer, ResBlock) else ()
            recompute = self.recompute and isinstance(layer, ResBlock | AttentionBlock)
            branch, base, shift, x = run_block(layer, branch, base, shift, *condition, recompute=recompute)
            entered = x if entered is None else entered
        return branch, base, shift, cast(Tensor, entered)
